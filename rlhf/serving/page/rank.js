// The next labelling task: prompt, responses to rank, save, undo; progress. The prompt and the buttons stay in view.

import { attempting, button, draft, el, field, get, instructionsOf, post, say, turnsOf } from "./dom.js";
import { Ranking } from "./ranking.js";

const KEYS = [["1 – 9", "next best"], ["Shift+1 – 9", "tie with the last"], ["Backspace", "unrank the last"], ["j, k", "next response, the one before"],
  ["r and 1 – 7", "rate the current response"], ["f and a letter", "flag it"], ["d", "mark in the others the words that it does not have"], ["n", "note (Escape leaves it)"], ["x", "cannot judge"],
  ["Enter", "save"], ["u", "undo the last"], ["?", "these keys"]];

export function makeRank(panel, me) {
  const read = draft(me, "instructions"); // a must-read until it was closed once
  const guide = instructionsOf(me, { open: read.get() !== me.instructions }); // not ontoggle: that comes later, and a reload may come first
  guide.querySelector("summary").onclick = () => { if (guide.open) read.set(me.instructions); };
  const keys = el("details", {}, el("summary", {}, "Keys (?)"), el("dl", { class: "keys" },
    ...KEYS.flatMap(([key, does]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, does)])));
  const about = el("span", { class: "name" });
  const place = el("div", { class: "ask" });
  const cards = el("div");
  const note = el("input", { type: "text", maxLength: 2000, oninput: () => ranking?.changed(), onkeydown: ({ key }) => {
    if (key === "Escape") note.blur();
    if (key === "Enter") onEnter();
  } });
  const strip = el("div");
  const save = button("Save", () => submit(false), { class: "main", disabled: true });
  const unable = button("Cannot judge", () => submit(true));
  const cancel = button("Cancel", () => next(), { hidden: true });
  panel.append(el("div", { class: "row help" }, guide, keys), place, cards, field("Note", note, true),
    el("div", { class: "bar" }, strip, el("div", { class: "row" }, save, unable, button("Undo the last", () => undo()), cancel, about)));
  let task = null, ranking = null, replaces = null, busy = false, sure = false, saved = null;

  function onEnter() { if (!save.disabled) submit(false); }

  function onKey(event) {
    if (!task) return false;
    if (ranking.onKey(event)) return true;
    const does = { Enter: onEnter, u: undo, x: () => submit(true), n: () => note.focus(), "?": () => { keys.open = !keys.open; } }[event.key];
    does?.();
    return does !== undefined;
  }

  function keep() {
    sure = false;
    save.disabled = busy || ranking.placed < 2;
    const changed = ranking.placed || note.value || Object.keys({ ...ranking.ratings, ...ranking.flagged }).length;
    if (!replaces) saved.set(changed ? { ...ranking.state, note: note.value } : null);
  }

  function open(found, answer) {
    task = found;
    ranking = task && new Ranking(task.responses, me);
    replaces = answer?.replaces;
    save.disabled = true;
    unable.disabled = !task;
    cancel.hidden = !replaces;
    place.replaceChildren(...(task ? turnsOf(task.messages) : [el("p", {}, me.tasks ? "Nothing is left to label. Thank you!"
      : "There are no labelling tasks. Make some with `rlhf sample run=…`, and start the server again.")]));
    cards.replaceChildren(ranking?.list ?? "");
    strip.replaceChildren(ranking?.strip ?? "");
    saved = task && draft(me, `rank-${task.name}`);
    const before = answer ?? saved?.get();
    note.value = before?.note ?? "";
    note.blur(); // the keys are for the new task
    if (!task) return;
    ranking.onchange = keep;
    ranking.load(before ?? undefined);
    cards.dataset.task = task.name;
    place.scrollTop = 0;
    if (!answer) window.scrollTo(0, 0);
  }

  const next = attempting(async () => {
    const { task: found, progress } = await get("/api/rank/next");
    about.textContent = `${progress.done} labelled, ${progress.left} to go`;
    open(found, null);
  });

  async function submit(cannot) {
    if (!task || busy) return;
    if (!cannot && ranking.placed < task.responses.length && !sure) {
      sure = true;
      say(`${ranking.placed} of ${task.responses.length} responses are ranked. Save again to leave the others out.`, true);
      return;
    }
    busy = save.disabled = true;
    try {
      await post("/api/rank", { ...ranking.verdict(task.name), note: note.value.trim(), replaces, ...(cannot ? { ranking: null } : {}) });
      saved.set(null);
      say("Saved.");
      await next();
    } catch (error) {
      say(`Not saved. ${error.message}`, true);
      if (error.status === 409) { saved.set(null); await next(); } // answered in another tab, or by enough others
    }
    busy = false;
    if (ranking) save.disabled = ranking.placed < 2;
  }

  const undo = attempting(async () => {
    const { task: found, answer } = await get("/api/rank/last");
    open(found, answer);
    say("Your last answer: change it and save, or cancel.");
  });
  return { show: () => { if (!task) next(); }, onKey };
}
