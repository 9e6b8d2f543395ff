// The most likely next tokens of a text, as `rlhf next` prints them.

import { attempt, el, field, post, say } from "./dom.js";

export function makeNext(panel, me) {
  const model = el("select", {}, ...me.models.map((name) => el("option", { value: name }, name)));
  const count = el("input", { type: "number", min: 1, max: 100, value: 10 });
  const text = el("textarea", { rows: 3 });
  const show = el("button", { class: "main", onclick: onShow }, "Show the next tokens");
  const rows = el("tbody");
  const table = el("table", { hidden: true }, el("caption", {}, "The most likely next tokens"),
    el("thead", {}, el("tr", {}, ...["token", "probability", "sum"].map((name) => el("th", { scope: "col" }, name)))), rows);
  panel.append(el("div", { class: "row" }, field("Model", model), field("Tokens", count)),
    field("Text, without a chat template", text, true), el("div", { class: "row" }, show), table);

  async function onShow() {
    if (!text.value) { say("Write a text.", true); return; }
    show.disabled = true;
    say("");
    await attempt(async () => {
      const found = await post("/api/next", { model: model.value, text: text.value, count: Number(count.value) });
      let sum = 0;
      rows.replaceChildren(...found.tokens.map((one) => {
        sum += one.probability;
        return el("tr", {}, el("td", { class: "text" }, one.text), el("td", {}, one.probability.toFixed(4)), el("td", {}, sum.toFixed(3)));
      }));
      table.hidden = false;
    });
    show.disabled = false;
  }
  return {};
}
