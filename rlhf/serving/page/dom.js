// Elements, requests and messages. Text of people and of models becomes text nodes only.

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  made.append(...children.filter((child) => child !== null && child !== undefined)); // first: a select has no value without options
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  return made;
}

export const field = (label, control, wide = false) => el("label", { class: wide ? "field wide" : "field" }, label, control);
export const button = (label, onclick, more = {}) => el("button", { onclick, ...more }, label);
export const checkbox = (value, checked, more = {}) => el("input", { type: "checkbox", value, checked, ...more });
export const choice = (names, value, values = names) => el("select", { value }, ...names.map((name, i) => el("option", { value: values[i] }, name)));
export const temperatureBox = () => el("input", { type: "number", min: 0, max: 2, step: 0.1, value: 1 });
export const instructionsOf = (me, more) => el("details", more, el("summary", {}, "Instructions"), el("p", { class: "text" }, me.instructions));
export const checked = (inside) => [...inside.querySelectorAll("input:checked")].map((box) => box.value);
export const withControlEnter = (place, does) => place.addEventListener("keydown", ({ key, ctrlKey, metaKey }) => {
  if (key === "Enter" && (ctrlKey || metaKey)) does();
});

export function say(text, bad = false) {
  Object.assign(document.getElementById("status"), { className: bad ? "bad" : "", textContent: text });
}

// Do something, and say what went wrong if anything did; returns whether nothing did.
export async function attempt(does, failed = "") {
  try {
    await does();
    return true;
  } catch (error) {
    say(failed + error.message, true);
    return false;
  }
}

export const attempting = (does) => (...of) => attempt(() => does(...of));

// What was typed and not saved, in this browser, apart for each labeler: it survives a reload.
export function draft(me, name) {
  const key = `rlhf ${me.labeler} ${name}`;
  return {
    get: () => JSON.parse(localStorage.getItem(key) ?? "null"),
    set: (value) => { if (value) localStorage.setItem(key, JSON.stringify(value)); else localStorage.removeItem(key); },
  };
}

// A submission's own id: sent again after a failure, it is saved once.
export function submissionId() {
  const numbers = crypto.getRandomValues(new Uint32Array(4));
  return Array.from(numbers, (n) => n.toString(16).padStart(8, "0")).join("-");
}

async function ask(path, body, signal) {
  const tab = sessionStorage.getItem("tab"); // whose it is
  const headers = { "content-type": "application/json", ...(tab === null ? {} : { "x-tab": tab }) };
  const sent = { method: body === undefined ? "GET" : "POST", headers, body: JSON.stringify(body), signal };
  const answer = await fetch(path, sent).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached. Nothing is lost: try again.");
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw Object.assign(new Error(told?.error?.message ?? `The server answered ${answer.status}.`), { status: answer.status });
}

export const get = async (path) => (await ask(path)).json();
export const post = async (path, body) => (await ask(path, body)).json();

// A text with its blocks of code (```), code in a line (`), and bold words (**) shown as such; all else is as written.
export function textOf(text) {
  return el("div", { class: "text" }, ...text.split(/(^```[^\n]*\n[^]*?^```$|`[^`\n]+`|\*\*(?=\S)[^*\n]+(?<=\S)\*\*)/m).map((part, i) => {
    if (i % 2 === 0) return part;
    if (part.startsWith("```")) return el("pre", {}, part.slice(part.indexOf("\n") + 1, -3));
    return part.startsWith("`") ? el("code", {}, part.slice(1, -1)) : el("strong", {}, part.slice(2, -2));
  }));
}

// A text with the words marked that another text does not have, by their longest common subsequence.
export function differenceOf(text, other) {
  const words = text.split(/(\s+)/), most = 4000; // the rest stays unmarked
  const [a, b] = [words, other.split(/(\s+)/)].map((one) => one.slice(0, most).filter(Boolean));
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1)); // of the rests from i and from j
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
  const made = el("div", { class: "text" });
  for (let i = 0, j = 0; i < a.length; i++) {
    while (j < b.length && a[i] !== b[j] && common[i][j + 1] >= common[i + 1][j] && common[i][j + 1] > 0) j++;
    const same = j < b.length && a[i] === b[j];
    made.append(same || !a[i].trim() ? a[i] : el("mark", {}, a[i]));
    j += same;
  }
  made.append(words.slice(most).join(""));
  return made;
}

export const turnsOf = (messages) => messages.map(({ role, content }) =>
  el("div", { class: `turn ${role}` }, el("div", { class: "name" }, role), textOf(content)));

// The seconds that the page was looked at since the call, so far; not those after a minute without a key, a move or a scroll.
let used = Date.now(), tenths = 0;
for (const kind of ["pointermove", "pointerdown", "keydown", "scroll"]) addEventListener(kind, () => { used = Date.now(); }, { capture: true, passive: true });
setInterval(() => { if (!document.hidden && Date.now() - used <= 60_000) tenths += 1; }, 100);
export function stopwatch() {
  const start = tenths;
  return () => (tenths - start) / 10;
}

// The events of an answer, parsed, as they come.
export async function* events(path, body, signal) {
  const reader = (await ask(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
