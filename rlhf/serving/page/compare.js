// One prompt to several models, side by side; the models are named after the judgement.

import { ask, attempt, el, events, field, post, say, submissionId, turnsOf, Watch } from "./dom.js";
import { button, isTyping, Ranking } from "./ranking.js";

export function makeCompare(panel, me) {
  const prompt = el("textarea", { rows: 3 });
  const boxes = me.models.map((name, i) => el("input", { type: "checkbox", value: name, checked: i >= me.models.length - 2 }));
  const temperature = el("input", { type: "number", min: 0, max: 2, step: 0.1, value: 1 });
  const draw = el("button", { class: "main", onclick: onDraw }, "Ask all");
  const asked = el("div", { class: "ask" });
  const place = el("div");
  const strip = el("div");
  const save = button("Save the judgement", () => onSave(false), { class: "main", disabled: true });
  const bad = button("All are bad", () => onSave(true), { hidden: true });
  const told = el("div");
  panel.append(field("Prompt", prompt, true),
    el("div", { class: "row" }, ...boxes.map((box) => el("label", { class: "inline" }, box, box.value)), field("Temperature", temperature), draw),
    asked, place, el("div", { class: "bar" }, strip, el("div", { class: "row" }, save, bad)), told);
  let name = null, ranking = null, submission = null;
  const watch = new Watch();

  document.addEventListener("keydown", (event) => {
    if (panel.hidden || !ranking || save.hidden || isTyping(event)) return;
    if (ranking.onKey(event)) event.preventDefault();
    else if (event.key === "Enter" && !event.target.closest("button, summary") && !save.disabled) onSave(false);
  });

  function onDraw() {
    const models = boxes.filter((box) => box.checked).map((box) => box.value);
    if (models.length < 2 || !prompt.value.trim()) { say("Write a prompt, and choose two models or more.", true); return; }
    return start([{ role: "user", content: prompt.value.trim() }], models);
  }

  async function start(messages, models) {
    asked.replaceChildren(...(messages.length > 1 ? turnsOf(messages) : []));
    draw.disabled = true;
    say("The models answer …");
    told.replaceChildren();
    await attempt(async () => {
      const drawn = await follow(await ask("/api/compare", { messages, models, temperature: temperature.valueAsNumber }), models.length);
      name = drawn.name;
      submission = submissionId();
      ranking = new Ranking(drawn.responses, me);
      ranking.list.addEventListener("changed", () => { save.disabled = ranking.placed < 2; submission = submissionId(); });
      place.replaceChildren(ranking.list);
      strip.replaceChildren(ranking.strip);
      save.hidden = bad.hidden = false;
      save.disabled = true;
      watch.restart();
      say("");
    });
    draw.disabled = false;
  }

  // Show the answers as they come; returns the last event, which names the comparison.
  async function follow(reply, count) {
    const texts = Array.from({ length: count }, () => el("p", { class: "text" }));
    ranking = null;
    save.disabled = bad.hidden = true;
    strip.replaceChildren();
    place.replaceChildren(el("ol", { class: "cards" }, ...texts.map((text, i) =>
      el("li", { class: "card" }, el("strong", {}, `Response ${i + 1}`), text))));
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      if (event.name) return event;
      texts[event.id.charCodeAt(0) - "a".charCodeAt(0)].textContent += event.text;
    }
    throw new Error("The answers ended early: ask again.");
  }

  // allBad: a tie of all, marked as such.
  async function onSave(allBad) {
    save.disabled = bad.disabled = true;
    save.disabled = await attempt(async () => {
      if (allBad) ranking.load({ ...ranking.state, ranking: [ranking.responses.map((one) => one.id)] });
      const { policies } = await post("/api/compare/judge", { ...ranking.verdict(name, submission, watch.seconds()), all_bad: allBad });
      say("Saved.");
      save.hidden = bad.hidden = true;
      told.replaceChildren(el("h2", {}, "Who wrote what"), el("ol", {}, ...ranking.tiers.flat().map((id) => {
        const number = ranking.responses.findIndex((r) => r.id === id) + 1;
        return el("li", {}, `Response ${number}: ${policies[id]}`);
      })));
    }, "Not saved. ");
    bad.disabled = false;
  }
  return { start };
}
