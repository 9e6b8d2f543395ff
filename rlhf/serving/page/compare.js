// One prompt to several models, side by side; the models are named after the judgement.

import { attempt, button, checkbox, checked, el, events, field, post, say, temperatureBox, turnsOf } from "./dom.js";
import { Ranking } from "./ranking.js";

export function makeCompare(panel, me) {
  const prompt = el("textarea", { rows: 3 });
  const boxes = me.models.map((name, i) => el("label", { class: "inline" }, checkbox(name, i >= me.models.length - 2), name));
  const temperature = temperatureBox();
  const draw = button("Ask all", onDraw, { class: "main" });
  const place = el("div");
  const save = button("Save the judgement", () => onSave(false), { class: "main" });
  const bad = button("All are bad", () => onSave(true));
  panel.append(field("Prompt", prompt, true),
    el("div", { class: "row" }, ...boxes, field("Temperature", temperature), draw),
    place);
  let name = null, ranking = null; // of the comparison to judge

  function onDraw() {
    const models = boxes.flatMap(checked);
    if (models.length < 2 || !prompt.value.trim()) { say("Write a prompt, and choose two models or more.", true); return; }
    return start([{ role: "user", content: prompt.value.trim() }], models);
  }

  // Show the answers as they come; the last event names the comparison.
  async function start(messages, models) {
    const texts = models.map(() => el("p", { class: "text" }));
    const cards = el("ol", { class: "cards" }, ...texts.map((text, i) => el("li", { class: "card" }, el("strong", {}, `Response ${i + 1}`), text)));
    place.replaceChildren(el("div", { class: "ask" }, ...(messages.length > 1 ? turnsOf(messages) : [])), cards);
    document.activeElement.blur(); // the keys are for the ranking
    ranking = null;
    draw.disabled = true;
    say("The models answer …");
    await attempt(async () => {
      let drawn = {};
      for await (const event of events("/api/compare", { messages, models, temperature: temperature.valueAsNumber })) {
        if (event.name) drawn = event;
        else texts[event.id.charCodeAt(0) - "a".charCodeAt(0)].textContent += event.text;
      }
      if (!drawn.name) throw new Error("The answers ended early: ask again.");
      name = drawn.name;
      ranking = new Ranking(drawn.responses, me);
      ranking.onchange = () => { save.disabled = ranking.placed < 2; };
      save.disabled = true;
      bad.disabled = false;
      cards.replaceWith(ranking.list, el("div", { class: "bar" }, ranking.strip, el("div", { class: "row" }, save, bad)));
      say("");
    });
    draw.disabled = false;
  }

  // allBad: a tie of all, marked as such.
  async function onSave(allBad) {
    save.disabled = bad.disabled = true;
    const saved = await attempt(async () => {
      if (allBad) ranking.load({ ...ranking.state, ranking: [ranking.responses.map((one) => one.id)] });
      const { policies } = await post("/api/compare/judge", { ...ranking.verdict(name), all_bad: allBad });
      say("Saved.");
      save.parentElement.remove();
      place.append(el("h2", {}, "Who wrote what"),
        el("ol", {}, ...ranking.tiers.flat().map((id) => el("li", {}, `Response ${ranking.numbers.get(id)}: ${policies[id]}`))));
      ranking = null;
    }, "Not saved. ");
    save.disabled = bad.disabled = saved;
  }
  return { start, onKey: (event) => (ranking && event.key === "Enter" ? save.click() : ranking?.onKey(event)) };
}
