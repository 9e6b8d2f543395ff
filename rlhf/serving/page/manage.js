// The page of who runs the labelling: progress, labelers, where they disagree, and the instructions. Nothing needs a restart.

import { attempt, button, checkbox, checked, el, field, get, post, say, textOf, turnsOf } from "./dom.js";
import { Ranking } from "./ranking.js";

export function makeManage(panel, me) {
  const bar = el("progress", { value: 0, max: 1, "aria-label": "Labels given" });
  const about = el("p", { class: "name" });
  const people = el("tbody"), tasks = el("tbody"), task = el("div"), names = el("span", { class: "row" });
  const name = el("input", { type: "text" }), link = el("p", { class: "text", role: "status" });
  const text = el("textarea", { rows: 12 });
  const table = (caption, names, body) => el("div", { class: "scroll", tabIndex: 0 }, el("table", {}, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...names.map((one) => (one ? el("th", { scope: "col" }, one) : el("td"))))), body));
  const act = (path, body, said, then) => () => attempt(async () => {
    const answer = await post(`/api/manage/${path}`, body());
    say(said);
    then?.(answer);
    await load();
  });
  const start = button("Train on these labels, and answer the next tasks", act("round", () => ({}), ""));
  const state = el("p", { class: "name", role: "status" }), effect = el("div");
  const rounds = el("div", { hidden: !me.rounds }, el("h2", {}, "Round"), start, state, effect);
  const assign = act("assign", () => ({ tasks: checked(tasks), labelers: checked(names) }), "The marked tasks are assigned.",
    () => { for (const inside of [tasks, names]) for (const box of inside.querySelectorAll("input:checked")) box.checked = false; });
  const labeler = (label, who) => button(label, act("labeler", () => ({ name: who, do: label.toLowerCase() }), `${who}: done.`),
    { class: "small", "aria-label": `${label} ${who}` });
  panel.append(bar, about, el("h2", {}, "Labelers"),
    table("Agreement: pairs that others order in the same way", ["name", "labels", "median seconds", "agreement", "gold items",
      "with itself", "warnings", "last label", ""], people),
    el("div", { class: "row" }, field("Name", name), button("Add a labeler", act("labeler", () => ({ name: name.value.trim(), do: "add" }), "Added.",
      (answer) => { link.textContent = `The link of ${name.value}, for this person only: ${answer.link}`; name.value = ""; }))), link,
    el("h2", {}, "Labels, most disputed first"), table("Pairs that two labelers order in opposite ways", ["", "task", "labels", "disputed pairs", "assigned to", ""], tasks),
    el("div", { class: "row" }, button("Mark all", () => { for (const box of tasks.querySelectorAll("input")) box.checked = true; }), names,
      button("Assign the marked tasks to these only (to everybody if none)",
        () => (checked(tasks).length ? assign() : say("Mark tasks first.", true)))), task,
    rounds, el("h2", {}, "Instructions"), field("Shown to every labeler, and open until it was read", text),
    button("Save the instructions", act("instructions", () => ({ text: text.value }), "The instructions are saved.")));
  let clicked = null;
  const percent = (value) => (value == null ? "–" : `${Math.round(100 * value)}%`);
  const row = (...cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell)));

  // A click with Shift marks all tasks since the last click.
  function mark({ target, shiftKey }) {
    const boxes = [...tasks.querySelectorAll("input")], ends = [boxes.indexOf(target), boxes.indexOf(clicked)].sort((a, b) => a - b);
    if (shiftKey && ends[0] >= 0) for (const box of boxes.slice(ends[0], ends[1])) box.checked = target.checked;
    clicked = target;
  }

  async function load() {
    const found = await get("/api/manage");
    const marked = new Set(checked(tasks)), chosen = new Set(checked(names)); // still so after the page is drawn again
    [bar.max, bar.value] = [Math.max(1, found.wanted), found.done];
    about.textContent = `${found.done} of ${found.wanted} labels`;
    people.replaceChildren(...found.people.map((one) => row(one.name, one.done, one.seconds?.toFixed(0) ?? "–",
      percent(one.agreement), percent(one.gold), percent(one.again), one.warnings.join("; ") || "–", one.last.slice(0, 16).replace("T", " "),
      one.known ? el("span", {}, labeler(one.paused ? "Resume" : "Pause", one.name), " ", labeler("Revoke", one.name)) : "revoked")));
    found.tasks.sort((a, b) => b.clashes - a.clashes);
    names.replaceChildren(...found.people.filter((one) => one.known).map((one) => el("label", { class: "inline" },
      checkbox(one.name, chosen.has(one.name)), one.name)));
    tasks.replaceChildren(...found.tasks.map((one) => row(checkbox(one.name, marked.has(one.name), { "aria-label": `Mark ${one.name}`, onclick: mark }),
      one.name, one.labels, one.pairs ? `${one.clashes} of ${one.pairs}` : "–", one.assigned.join(", ") || "–",
      button(one.decided ? "Decided" : "Open", () => open(one.name), { class: "small", "aria-label": `${one.decided ? "Decided" : "Open"} ${one.name}` }))));
    if (me.rounds) await showRound();
    if (text.dataset.said !== found.instructions) text.value = text.dataset.said = found.instructions;
  }

  // The pipeline's progress, until it ends; then what the round's labels changed.
  async function showRound() {
    const { run, running, code, last, stages, effect: found } = await get("/api/manage/round");
    start.disabled = running;
    state.textContent = `Run ${run}: ${Object.entries(stages).map(([stage, is]) => `${stage} ${is}`).join(", ")}`
      + `${running ? ". Running" : code === null ? "" : `. Ended with code ${code}`}${last ? `: ${last}` : ""}`;
    if (running) setTimeout(() => { if (!panel.hidden) attempt(showRound); }, 2000);
    if (!found) { effect.replaceChildren(); return; }
    const own = Object.entries(found.new).map(([how, one]) => row(`this round's labels (${how}), before training on them`, one.pairs, percent(one.before), "–"));
    const two = (values) => values.map((value) => value.toFixed(2)).join(" → ");
    effect.replaceChildren(
      table("Pairs that the reward model orders as labelers do", ["pairs of", "pairs", "before", "after"],
        el("tbody", {}, row("held-out prompts", found.held_out.pairs, percent(found.held_out.before), percent(found.held_out.after)), ...own)),
      table("The most surprising pairs; surprise in nats, before → after", ["prompt", "preferred", "to", "by", "score difference", "surprise"],
        el("tbody", {}, ...found.pairs.map((one) => row(one.prompt, one.better, one.worse, one.labeler ?? "–", two(one.difference), two(one.surprise))))));
  }

  async function open(which) {
    const { messages, responses, labels } = await get(`/api/manage/task?name=${encodeURIComponent(which)}`);
    const ranking = new Ranking(responses, me), number = ranking.numbers;
    const shown = (tiers) => tiers?.map((tier) => tier.map((id) => number.get(id)).join(" = ")).join(" > ") ?? "cannot judge";
    const before = labels.find((one) => one.labeler === "manager");
    if (before) ranking.load(before);
    const decide = act("decide", () => ({ ...ranking.verdict(which), replaces: before?.id }),
      "The decision is saved.", () => task.replaceChildren());
    task.replaceChildren(...turnsOf(messages), table("Rankings, best first", ["labeler", "ranking", "ratings", "flags", "note"],
      el("tbody", {}, ...labels.map((one) => row(one.labeler, shown(one.ranking),
        ...[one.ratings, one.flags].map((of) => Object.entries(of).map(([id, value]) => `${number.get(id)}: ${value}`).join("; ")), textOf(one.note))))),
    ranking.list, el("div", { class: "bar" }, ranking.strip, el("div", { class: "row" }, button("Save the decision", decide, { class: "main" }))));
    task.scrollIntoView();
  }
  return { show: () => attempt(load) };
}
