// Write the ideal response to a prompt: of the next task, or one's own. The task's responses can be edited.

import { attempt, attempting, button, draft, el, field, get, instructionsOf, post, say, stopwatch, submissionId, turnsOf, withControlEnter } from "./dom.js";

export function makeDemonstrate(panel, me) {
  const shown = el("div");
  const own = el("textarea", { rows: 3 });
  const ownField = field("Prompt", own, true);
  const response = el("textarea", { rows: 8 });
  const drafts = el("div"), draftBox = el("details", {}, el("summary", {}, "Start from a response"), drafts);
  const save = button("Save", onSave, { class: "main" });
  panel.append(instructionsOf(me), shown, ownField, draftBox, field("The ideal response", response, true),
    el("div", { class: "row" }, save, button("Write a prompt of my own", () => open(null))));
  let task = null, messages = null, edited = null, submission = submissionId(), seconds = stopwatch();
  const saved = draft(me, "demonstration");
  panel.addEventListener("input", keep);
  withControlEnter(panel, onSave);

  function keep() {
    submission = submissionId(); // another answer is another submission
    const typed = own.value || response.value;
    saved.set(typed ? { task, edited, own: own.value, response: response.value } : null);
  }

  // A task, or none to write a prompt of one's own.
  function open(found) {
    const responses = found?.responses ?? [];
    task = found?.name ?? null;
    messages = found?.messages;
    edited = null;
    draftBox.hidden = responses.length === 0;
    draftBox.open = false;
    drafts.replaceChildren(...responses.map((one, i) => el("div", { class: "turn" },
      el("p", { class: "text" }, one.text),
      el("div", { class: "tools" }, button(`Edit response ${i + 1}`, () => edit(one, responses))))));
    submission = submissionId();
    shown.replaceChildren(...turnsOf(messages ?? []));
    ownField.hidden = found !== null;
    seconds = stopwatch();
  }

  function edit(one, responses) {
    const typed = response.value.trim();
    if (typed && responses.every((other) => other.text.trim() !== typed)) { say("Empty the box first: it holds what you have written.", true); return; }
    response.value = one.text;
    edited = one.id;
    keep();
    response.focus();
  }

  const next = attempting(async () => {
    const found = (await get("/api/demonstrate/next")).task, before = saved.get();
    open(before && !before.task ? null : found);
    if (before && before.task === task) [own.value, response.value, edited] = [before.own, before.response, before.edited]; // before a reload
  });

  async function onSave() {
    const prompt = messages ?? [{ role: "user", content: own.value.trim() }];
    if (!response.value.trim() || !prompt.at(-1).content) { say("Write a prompt and a response.", true); return; }
    save.disabled = true;
    await attempt(async () => {
      await post("/api/demonstrate", { messages: prompt, response: response.value.trim(), submission, seconds: seconds(), task, edited });
      response.value = own.value = "";
      saved.set(null);
      say("Saved.");
      await next();
    }, "Not saved. ");
    save.disabled = false;
  }
  return { show: () => { if (!messages && !own.value && !response.value) next(); } };
}
