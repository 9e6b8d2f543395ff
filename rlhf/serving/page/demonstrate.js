// Write the ideal response to a prompt: of the next task, or one's own.

import { el, field, get, post, say, submissionId, turnsOf, Watch } from "./dom.js";

export function makeDemonstrate(panel, me) {
  const shown = el("div");
  const own = el("textarea", { rows: 3 });
  const ownField = field("Prompt", own, true);
  const response = el("textarea", { rows: 8 });
  const save = el("button", { class: "main", onclick: onSave }, "Save");
  const other = el("button", { onclick: () => open(null, null) }, "Write a prompt of my own");
  panel.append(el("details", {}, el("summary", {}, "Instructions"), el("p", { class: "text" }, me.instructions)),
    shown, ownField, field("The ideal response", response, true), el("div", { class: "row" }, save, other));
  let task = null, messages = null, submission = submissionId();
  const watch = new Watch();

  function open(name, turns) {
    task = name;
    messages = turns;
    submission = submissionId();
    shown.replaceChildren(...(turns ? turnsOf(turns) : []));
    ownField.hidden = turns !== null;
    watch.restart();
  }

  async function next() {
    try {
      const found = await get("/api/demonstrate/next");
      open(found.task, found.messages);
    } catch (error) {
      say(error.message, true);
    }
  }

  async function onSave() {
    const prompt = messages ?? [{ role: "user", content: own.value.trim() }];
    if (!response.value.trim() || !prompt.at(-1).content) {
      say("Write a prompt and a response.", true);
      return;
    }
    save.disabled = true;
    try {
      const body = { messages: prompt, response: response.value.trim(), submission, seconds: watch.seconds() };
      if (task) body.task = task;
      await post("/api/demonstrate", body);
      response.value = own.value = "";
      say("Saved.");
      await next();
    } catch (error) {
      say(`Not saved. ${error.message}`, true);
    }
    save.disabled = false;
  }
  return { show: () => { if (!messages && !own.value && !response.value) next(); } };
}
