/* The inner loops of sampling on a CPU (rlhf/cpu/kernels.py): the attention of new tokens to a cache of keys and values, and the
   choice of a token per row. float32, in GCC's vector extensions, in vectors of the size that the processor has: GCC computes with larger
   ones number by number. NaN in a row makes the row's results NaN: comparisons leave it out, sums do not. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined __AVX512F__
#define LANES 16
#define NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined __AVX2__
#define LANES 8
#define NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else /* SSE2, NEON */
#define LANES 4
#define NUMBERS 0, 1, 2, 3
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif
#define BLOCK 128      /* columns whose scores are computed before their values are added; tokens whose sum is searched first */
#define MOST_WIDTH 256 /* of a head */
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static const ints LANE_NUMBERS = {NUMBERS};

/* Of any alignment. */
INLINE floats load(const float *from) { floats x; memcpy(&x, from, sizeof x); return x; }
INLINE void store(float *to, floats x) { memcpy(to, &x, sizeof x); }
INLINE floats broadcast(float x) { return x - (floats){0}; }

/* Per lane: yes if the mask is -1, as comparisons give, no if it is 0. */
INLINE ints pick_ints(ints mask, ints yes, ints no) { return (mask & yes) | (~mask & no); }
INLINE floats pick(ints mask, floats yes, floats no) { return (floats)pick_ints(mask, (ints)yes, (ints)no); }

/* In pairs, which rounds less than one after the other. */
INLINE float sum(floats x)
{
    float total[LANES];
    store(total, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            total[i] += total[i + half];
    return total[0];
}

INLINE float highest_of(floats x)
{
    float high = x[0];
    for (int i = 1; i < LANES; i++)
        high = x[i] > high ? x[i] : high;
    return high;
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* (a0 + a1, a2 + a3, ..., b0 + b1, ...) */
INLINE floats add_neighbours(floats a, floats b)
{
    return SHUFFLE(a, b, EVEN) + SHUFFLE(a, b, ODD);
}

/* Lane i: the sum of vector i of LANES. Writes over them. */
INLINE floats sum_each(floats *x)
{
    for (int count = LANES / 2; count; count /= 2)
        for (int i = 0; i < count; i++)
            x[i] = add_neighbours(x[2 * i], x[2 * i + 1]);
    return x[0];
}

/* e^x for x <= 0 to 2e-7 of it, 0 below -87: x = n ln 2 + r, with Taylor's series of e^r for |r| <= ln(2) / 2. */
INLINE floats exp_of(floats x)
{
    const floats shift = broadcast(12582912.0f); /* 1.5 * 2^23: added and subtracted, it leaves a whole number */
    floats n = (x * 1.44269504f + shift) - shift;
    floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 = 0.693359375 - 2.12194440e-4; n times the first is exact */
    floats y = r * (1.0f / 5040) + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r * r + r + 1.0f;
    ints power = (__builtin_convertvector(n, ints) + 127) << 23; /* the bits of 2^n */
    return pick(x < broadcast(-87.0f), broadcast(0.0f), y * (floats)power);
}

/* One query's attention in progress: y = sum_j e^(s_j - top) V_j and total = sum_j e^(s_j - top) over the columns so far. */
typedef struct {
    floats y[MOST_WIDTH / LANES];
    float total, top;
} Partial;

/* Adds the columns [first, last) of one head, with scores s_j = q . K_j (q is scaled). Memory is slower than the arithmetic, so what
   is read next is fetched meanwhile: the values while the scores are computed, then `next`, the keys of the head after this one. */
INLINE void add_columns(Partial *partial, const float *q, const float *K, const float *V, const float *next, int64_t first,
                        int64_t last, int width)
{
    float score[BLOCK];
    for (int64_t start = first; start < last; start += BLOCK) {
        const int count = last - start < BLOCK ? last - start : BLOCK;
        floats highest = broadcast(partial->top);
        for (int j = 0; j < count; j += LANES) {
            floats products[LANES];
            for (int i = 0; i < LANES; i++) {
                const float *k = K + (start + (j + i < count ? j + i : count - 1)) * width;
                products[i] = broadcast(0);
                for (int d = 0; d < width; d += LANES) {
                    products[i] += load(q + d) * load(k + d);
                    __builtin_prefetch(V + (k - K) + d);
                }
            }
            floats s = sum_each(products);
            s = pick(LANE_NUMBERS + j < count, s, broadcast(-INFINITY));
            highest = pick(s > highest, s, highest);
            store(score + j, s);
        }
        const float high = highest_of(highest);
        const float before = partial->total > 0 ? expf(partial->top - high) : 0;
        floats added = {0};
        for (int j = 0; j < count; j += LANES) {
            floats e = exp_of(load(score + j) - high);
            added += e;
            store(score + j, e);
        }
        partial->total = partial->total * before + sum(added);
        partial->top = high;
        floats y[MOST_WIDTH / LANES];
        for (int d = 0; d < width / LANES; d++)
            y[d] = partial->y[d] * before;
        for (int j = 0; j < count; j++)
            for (int d = 0; d < width / LANES; d++) {
                y[d] += score[j] * load(V + (start + j) * width + d * LANES);
                __builtin_prefetch(next + (start + j) * width + d * LANES);
            }
        for (int d = 0; d < width / LANES; d++)
            partial->y[d] = y[d];
    }
}

/* y = softmax(scale q . K) V of one query over the columns j < leading and tail <= j < columns. */
INLINE void attend_head(const float *q, const float *K, const float *V, const float *next, float *y, int64_t leading, int64_t tail,
                        int64_t columns, int width, float scale)
{
    Partial partial = {.total = 0, .top = -INFINITY};
    float scaled[MOST_WIDTH];
    for (int d = 0; d < width; d++)
        scaled[d] = scale * q[d];
    for (int d = 0; d < width / LANES; d++)
        partial.y[d] = broadcast(0);
    add_columns(&partial, scaled, K, V, next, 0, leading, width);
    add_columns(&partial, scaled, K, V, next, tail, columns, width);
    for (int d = 0; d < width / LANES; d++)
        store(y + d * LANES, partial.y[d] / partial.total);
}

/* Attention of new tokens to a cache. First the key and value of each token n go to column place[n] of cache row row[n]. Then for
   each of its query heads y = softmax(scale q . K) V over the columns j < leading[n] and tail <= j < columns of the cache of its key
   head. Shapes: q, y (tokens, heads, width), k, v (tokens, key_heads, width), keys, values (rows, key_heads, at least columns,
   width); width: a multiple of 16 up to MOST_WIDTH. stride_*: floats from one token or row to the next; stride_head: from one
   key head. */
void attend(const float *q, const float *k, const float *v, float *keys, float *values, float *y, const int64_t *row,
            const int64_t *place, const int64_t *leading, int64_t tail, int64_t columns, int64_t tokens, int64_t heads,
            int64_t key_heads, int64_t width, int64_t stride_q, int64_t stride_k, int64_t stride_v, int64_t stride_row,
            int64_t stride_head, float scale)
{
    const int64_t group = heads / key_heads;
    int64_t work = 0;
    for (int64_t n = 0; n < tokens; n++)
        work += (leading[n] + columns - tail) * heads * width;
    for (int64_t n = 0; n < tokens; n++)
        for (int64_t g = 0; g < key_heads; g++) {
            const int64_t to = row[n] * stride_row + g * stride_head + place[n] * width;
            memcpy(keys + to, k + n * stride_k + g * width, 4 * width);
            memcpy(values + to, v + n * stride_v + g * width, 4 * width);
        }
#pragma omp parallel for schedule(static) if (work > 100000)
    for (int64_t part = 0; part < tokens * key_heads; part++) {
        const int64_t n = part / key_heads, g = part % key_heads, after = part + 1 < tokens * key_heads ? part + 1 : part;
        const float *K = keys + row[n] * stride_row + g * stride_head, *V = values + row[n] * stride_row + g * stride_head;
        const float *next = keys + row[after / key_heads] * stride_row + after % key_heads * stride_head;
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            const float *query = q + n * stride_q + h * width;
            float *out = y + (n * heads + h) * width;
            switch (width) { /* a constant width keeps the sums in registers */
            case 16: attend_head(query, K, V, next, out, leading[n], tail, columns, 16, scale); break;
            case 32: attend_head(query, K, V, next, out, leading[n], tail, columns, 32, scale); break;
            case 64: attend_head(query, K, V, next, out, leading[n], tail, columns, 64, scale); break;
            case 128: attend_head(query, K, V, next, out, leading[n], tail, columns, 128, scale); break;
            default: attend_head(query, K, V, next, out, leading[n], tail, columns, width, scale);
            }
        }
    }
}

/* A row of logits in vectors, divided by the temperature and padded by -INFINITY; `scaled` reads it. */
typedef struct {
    const float *logits;
    int64_t full; /* tokens in whole vectors */
    floats rest; /* the tokens after these, already divided */
    float temperature;
} Row;

INLINE Row row_of(const float *logits, int64_t size, float temperature)
{
    const int64_t full = size / LANES * LANES;
    float rest[LANES];
    for (int i = 0; i < LANES; i++)
        rest[i] = full + i < size ? logits[full + i] / temperature : -INFINITY;
    return (Row){.logits = logits, .full = full, .rest = load(rest), .temperature = temperature};
}

/* The tokens from j, a multiple of LANES, on. */
INLINE floats scaled(const Row *row, int64_t j) { return j < row->full ? load(row->logits + j) / row->temperature : row->rest; }

/* Per row: the first token at which the cumulative sum of p = softmax(logits / temperature) exceeds the row's uniform number,
   and its log-prob. First the block of tokens, then the token in it. block_sums: room for the sums of a row's blocks, per row. */
void invert(const float *logits, const float *uniforms, int64_t *tokens, float *logprobs, float *block_sums, int64_t rows, int64_t size,
            int64_t stride, float temperature)
{
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (rows * size > 20000)
    for (int64_t b = 0; b < rows; b++) {
        const Row row = row_of(logits + b * stride, size, temperature);
        float *block_sum = block_sums + b * blocks, inside[BLOCK];
        floats high = broadcast(-INFINITY);
        for (int64_t j = 0; j < size; j += LANES) {
            const floats x = scaled(&row, j);
            high = pick(x > high, x, high);
        }
        const float top = highest_of(high);
        double total = 0, sought, before = 0;
        for (int64_t n = 0; n < blocks; n++) {
            floats added = {0};
            for (int64_t j = n * BLOCK; j < (n + 1) * BLOCK && j < size; j += LANES)
                added += exp_of(scaled(&row, j) - top);
            total += block_sum[n] = sum(added);
        }
        sought = total * uniforms[b];
        int64_t n = 0;
        while (n + 1 < blocks && before + block_sum[n] <= sought)
            before += block_sum[n++];
        const int64_t first = n * BLOCK, count = size - first < BLOCK ? size - first : BLOCK;
        for (int64_t j = 0; j < count; j += LANES)
            store(inside + j, exp_of(scaled(&row, first + j) - top));
        int64_t token = first; /* the last possible one if rounding leaves the block's own sum below */
        for (int64_t j = 0; j < count && before <= sought; j++)
            if (inside[j] > 0) {
                before += inside[j];
                token = first + j;
            }
        tokens[b] = token;
        logprobs[b] = row.logits[token] / temperature - top - (float)log(total);
    }
}
