// The next labelling task: prompt, responses to rank, save, undo; progress and agreement.

import { el, get, post, say, submissionId, turnsOf, Watch } from "./dom.js";
import { Ranking } from "./ranking.js";

export function makeRank(panel, me) {
  const guide = el("details", {}, el("summary", {}, "Instructions"), el("p", { class: "text" }, me.instructions));
  const about = el("p", { class: "name" });
  const bar = el("progress", { value: 0, max: 1 });
  bar.setAttribute("aria-label", "Tasks labelled");
  const place = el("div");
  const save = el("button", { class: "main", disabled: true, onclick: () => submit(false) }, "Save");
  const unable = el("button", { onclick: () => submit(true) }, "Cannot judge");
  const undo = el("button", { onclick: onUndo }, "Undo the last");
  const keys = el("p", { class: "name" }, "Keys: ", el("kbd", {}, "1"), "–", el("kbd", {}, "9"), " next best, with ",
    el("kbd", {}, "Shift"), " a tie, ", el("kbd", {}, "Backspace"), " unrank the last, ", el("kbd", {}, "Enter"), " save, ",
    el("kbd", {}, "u"), " undo");
  panel.append(guide, bar, about, place, el("div", { class: "row" }, save, unable, undo), keys);
  let task = null, ranking = null, submission = null, replaces = null, busy = false;
  const watch = new Watch();

  document.addEventListener("keydown", (event) => {
    if (panel.hidden || !task) return;
    if (ranking.onKey(event)) { event.preventDefault(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("textarea, input, select")) return;
    if (event.key === "Enter" && !event.target.closest("button, summary, a") && !save.disabled) submit(false);
    else if (event.key === "Enter" && event.target.classList.contains("put") && ranking.placed === task.responses.length) {
      event.preventDefault();
      submit(false);
    } else if (event.key === "u") onUndo();
  });

  function open(found, answer) {
    task = found;
    replaces = answer?.replaces ?? null;
    submission = submissionId();
    place.replaceChildren();
    save.disabled = unable.disabled = true;
    if (!task) {
      ranking = null;
      place.append(el("p", {}, me.tasks ? "Nothing is left to label. Thank you!"
        : "There are no labelling tasks. Make some with `rlhf sample run=…`, and start the server again."));
      return;
    }
    ranking = new Ranking(task.responses, me.flags);
    ranking.list.addEventListener("changed", () => { save.disabled = busy || ranking.placed < 2; });
    place.append(...turnsOf(task.messages), ranking.list);
    if (answer) ranking.load(answer);
    unable.disabled = false;
    place.dataset.task = task.name;
    if (!answer) window.scrollTo(0, 0);
    watch.restart();
  }

  function tell({ done, left, agreement, shared }) {
    bar.max = Math.max(1, done + left);
    bar.value = done;
    about.textContent = `${done} labelled, ${left} to go`
      + (agreement === null || agreement === undefined ? "" : `; the others order ${Math.round(100 * agreement)}% of pairs as you do (${shared} shared)`);
  }

  async function next() {
    try {
      const found = await get("/api/rank/next");
      tell(found.progress);
      open(found.task, null);
    } catch (error) {
      say(error.message, true);
    }
  }

  async function submit(cannot) {
    if (!task || busy) return;
    busy = save.disabled = true;
    try {
      const verdict = ranking.verdict(task.name, submission, watch.seconds());
      if (cannot) verdict.ranking = null;
      if (replaces) verdict.replaces = replaces;
      await post("/api/rank", verdict);
      say("Saved.");
      await next();
    } catch (error) {
      say(`Not saved. ${error.message}`, true);
      save.disabled = false;
    }
    busy = false;
  }

  async function onUndo() {
    try {
      const { task: found, answer } = await get("/api/rank/last");
      open(found, answer);
      say("Your last answer: change it and save, or leave it and reload.");
    } catch (error) {
      say(error.message, true);
    }
  }
  return { show: () => { if (!task) next(); } };
}
