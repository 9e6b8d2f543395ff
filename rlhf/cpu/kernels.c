/* The inner loops of sampling on a CPU (rlhf/cpu/kernels.py): the attention of new tokens to a cache of keys and values, and the choice
   of a token per row. float32, in vectors of the processor's size, which the compiler finds by itself where no type says so. NaN in a
   row makes the row's results NaN: comparisons leave it out, sums do not. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 128      /* columns whose scores are computed before their values are added; tokens whose sum is searched first */
#define MOST_WIDTH 256 /* of a head */
#if defined __AVX512F__ /* numbers per vector: GCC computes with larger vectors than the processor's number by number */
#define LANES 16
#elif defined __AVX2__
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* (a0 + a1, a2 + a3, ..., b0 + b1, ...) */
INLINE floats add_neighbours(floats a, floats b)
{
#ifdef __clang__
    floats sums;
    for (int i = 0; i < LANES / 2; i++) {
        sums[i] = a[2 * i] + a[2 * i + 1];
        sums[i + LANES / 2] = b[2 * i] + b[2 * i + 1];
    }
    return sums;
#else
    int32_t even __attribute__((vector_size(4 * LANES)));
    for (int i = 0; i < LANES; i++)
        even[i] = 2 * i;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
#endif
}

/* e^x for x <= 0 to 2e-7 of it, 0 below -87: x = n ln 2 + r, with Taylor's series of e^r for |r| <= ln(2) / 2. */
INLINE float exp_of(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: added and subtracted, it leaves a whole number */
    const float n = (x * 1.44269504f + shift) - shift;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 = 0.693359375 - 2.12194440e-4; n times the first is exact */
    float y = r * (1.0f / 5040) + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r * r + r + 1.0f;
    const int32_t bits = ((int32_t)n + 127) << 23; /* of 2^n */
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : y * power;
}

/* y = softmax(scale q . K) V of one query over the first columns, in blocks: y and total are sums of e^(s_j - top) over the columns so
   far. Memory is slower than the arithmetic: the values are fetched while the scores are computed, and `next`, the keys of the head
   after this one, while the values are added. */
INLINE void attend_head(const float *restrict q, const float *restrict K, const float *restrict V, const float *next,
                        float *restrict out, int64_t columns, const int width, float scale)
{
    float score[BLOCK], total = 0, top = -INFINITY;
    floats y[MOST_WIDTH / LANES] = {0};
    for (int64_t start = 0; start < columns; start += BLOCK) {
        const int count = columns - start < BLOCK ? columns - start : BLOCK;
        for (int j = 0; j < count; j += LANES) { /* LANES columns at once: their products are summed together */
            floats s[LANES];
            for (int i = 0; i < LANES; i++) {
                const float *k = K + (start + (j + i < count ? j + i : count - 1)) * width;
                s[i] = (floats){0};
                for (int d = 0; d < width / LANES; d++) {
                    s[i] += ((const floats *)q)[d] * ((const floats *)k)[d];
                    __builtin_prefetch(V + (k - K) + d * LANES);
                }
            }
            for (int n = LANES / 2; n; n /= 2)
                for (int i = 0; i < n; i++)
                    s[i] = add_neighbours(s[2 * i], s[2 * i + 1]);
            *(floats *)(score + j) = scale * s[0];
        }
        float high = top, added = 0;
#pragma omp simd reduction(max : high)
        for (int j = 0; j < count; j++)
            high = score[j] > high ? score[j] : high;
#pragma omp simd reduction(+ : added)
        for (int j = 0; j < count; j++) {
            score[j] = exp_of(score[j] - high);
            added += score[j];
        }
        const float before = total > 0 ? expf(top - high) : 0;
        total = total * before + added;
        top = high;
        for (int d = 0; d < width / LANES; d++)
            y[d] *= before;
        for (int j = 0; j < count; j++) {
            const floats *v = (const floats *)(V + (start + j) * width);
            for (int d = 0; d < width / LANES; d++)
                y[d] += score[j] * v[d];
            for (int d = 0; d < width; d += 16)
                __builtin_prefetch(next + (start + j) * width + d);
        }
    }
    for (int d = 0; d < width / LANES; d++)
        ((floats *)out)[d] = y[d] / total;
}

/* Attention of one new token per row to a cache of keys and values. First the key and value of the token of row n go to column
   lengths[n] of the row. Then for each of its query heads y = softmax(scale q . K) V over the columns up to that one, of the cache of
   its key head. Shapes: q, y (rows, heads, width), k, v (rows, key_heads, width), keys, values (rows, key_heads, columns, width);
   width: a multiple of 16 up to MOST_WIDTH. stride_*: floats from one row to the next; stride_head: from one key head. */
void attend(const float *q, const float *k, const float *v, float *keys, float *values, float *y, const int64_t *lengths,
            int64_t rows, int64_t heads, int64_t key_heads, int64_t width, int64_t stride_q, int64_t stride_k, int64_t stride_v,
            int64_t stride_row, int64_t stride_head, float scale)
{
    const int64_t group = heads / key_heads;
    int64_t work = 0;
    for (int64_t n = 0; n < rows; n++) {
        work += (lengths[n] + 1) * heads * width;
        for (int64_t g = 0; g < key_heads; g++) {
            const int64_t to = n * stride_row + g * stride_head + lengths[n] * width;
            memcpy(keys + to, k + n * stride_k + g * width, 4 * width);
            memcpy(values + to, v + n * stride_v + g * width, 4 * width);
        }
    }
#pragma omp parallel for schedule(static) if (work > 100000)
    for (int64_t part = 0; part < rows * key_heads; part++) {
        const int64_t n = part / key_heads, g = part % key_heads, after = part + 1 < rows * key_heads ? part + 1 : part;
        const float *K = keys + n * stride_row + g * stride_head, *V = values + n * stride_row + g * stride_head;
        const float *next = keys + after / key_heads * stride_row + after % key_heads * stride_head;
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            const float *query = q + n * stride_q + h * width;
            float *out = y + (n * heads + h) * width;
            switch (width) { /* a constant width keeps the sums in registers */
#define OF_WIDTH(W) case W: attend_head(query, K, V, next, out, lengths[n] + 1, W, scale); break;
            OF_WIDTH(16) OF_WIDTH(32) OF_WIDTH(48) OF_WIDTH(64) OF_WIDTH(80) OF_WIDTH(96) OF_WIDTH(128)
            default: attend_head(query, K, V, next, out, lengths[n] + 1, width, scale);
            }
        }
    }
}

/* Per row: the first token at which the cumulative sum of p = softmax(logits / temperature) exceeds the row's uniform number,
   and its log-prob. First the block of tokens, then the token in it. block_sums: room for the sums of a row's blocks, per row. */
void invert(const float *logits, const float *uniforms, int64_t *tokens, float *logprobs, float *block_sums, int64_t rows, int64_t size,
            int64_t stride, float temperature)
{
    const int64_t blocks = (size + BLOCK - 1) / BLOCK;
    const float scale = 1 / temperature;
#pragma omp parallel for schedule(static) if (rows * size > 20000)
    for (int64_t b = 0; b < rows; b++) {
        const float *row = logits + b * stride;
        float *block_sum = block_sums + b * blocks, inside[BLOCK], high = -INFINITY;
#pragma omp simd reduction(max : high)
        for (int64_t j = 0; j < size; j++)
            high = row[j] > high ? row[j] : high;
        const float top = high * scale;
        double total = 0, before = 0;
        for (int64_t n = 0; n < blocks; n++) {
            const float *part = row + n * BLOCK;
            const int count = size - n * BLOCK < BLOCK ? size - n * BLOCK : BLOCK;
            float added = 0;
#pragma omp simd reduction(+ : added)
            for (int j = 0; j < count; j++)
                added += exp_of(part[j] * scale - top);
            total += block_sum[n] = added;
        }
        const double sought = total * uniforms[b];
        int64_t n = 0;
        while (n + 1 < blocks && before + block_sum[n] <= sought)
            before += block_sum[n++];
        const int64_t first = n * BLOCK, count = size - first < BLOCK ? size - first : BLOCK;
        for (int64_t j = 0; j < count; j++)
            inside[j] = exp_of(row[first + j] * scale - top);
        int64_t token = first; /* the last possible one if rounding leaves the block's own sum below */
        for (int64_t j = 0; j < count && before <= sought; j++)
            if (inside[j] > 0) {
                before += inside[j];
                token = first + j;
            }
        tokens[b] = token;
        logprobs[b] = row[token] * scale - top - (float)log(total);
    }
}
