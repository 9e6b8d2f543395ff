// Chat with any loaded model: streamed, with regenerate, edit, and shading of tokens by log-prob or KL.

import { attempt, button, choice, el, events, field, post, say, submissionId, temperatureBox, withControlEnter } from "./dom.js";

const RANKED = 4; // answers to one turn that are ranked

export function makeChat(panel, me, compare) {
  const model = choice(me.models, me.models.at(-1));
  const system = el("textarea", { rows: 1 });
  const seed = el("input", { type: "number", min: 0, placeholder: "random" });
  const temperature = temperatureBox();
  const shading = choice(["off", "log-prob", "KL to the reference"], "", ["", "logprobs", "kl"]);
  const reference = choice(me.models, me.models.find((name) => name.endsWith("/sft")) ?? me.models[0]);
  const legend = el("p", { class: "name", hidden: true }); // of the shades
  const list = el("div", { class: "turns" });
  const text = el("textarea", { rows: 3, placeholder: "Write a message", "aria-label": "Message" });
  const send = button("Send", onSend, { class: "main" });
  const stop = button("Stop", () => running?.abort(), { disabled: true });
  panel.append(
    el("div", { class: "row" }, field("Model", model), field("Seed", seed), field("Temperature", temperature),
      field("Shade tokens by", shading), field("Reference", reference)),
    el("details", {}, el("summary", {}, "System prompt"), field("System prompt", system)),
    legend, list, text, el("div", { class: "row" }, send, stop, button("Send, and write the answer myself", onWrite), button("New dialogue", onClear),
      button("Save as a demonstration", onSave), el("span", { class: "name" }, "Ctrl+Enter sends")));

  let turns = []; // {role, content, ids}
  let running = null, saving = null;

  withControlEnter(text, onSend);
  // Leaving the box of an answer moves what is below it, so the click on a button closes it first, not the button's focus.
  panel.addEventListener("click", (event) => { if (event.target.closest("button") && list.contains(document.activeElement)) document.activeElement.blur(); }, true);
  shading.addEventListener("change", draw);
  reference.addEventListener("change", () => { for (const turn of turns) turn.shades = null; draw(); });

  // Takes what was typed as the user's turn.
  function take() {
    const said = text.value.trim();
    if (!said || running) return false;
    turns.push({ role: "user", content: said });
    text.value = "";
    return true;
  }

  function onSend() { if (take()) answer(); }

  function onWrite() {
    if (!take()) return;
    turns.push({ role: "assistant", content: "", ids: [], model: "you", finish: "stop" });
    draw();
    onRewrite(turns.at(-1));
  }

  // The turn becomes a box until it is left.
  function onRewrite(turn) {
    const box = el("textarea", { rows: 4, value: turn.content, "aria-label": "The answer", onblur: () => {
      if (box.value !== turn.content) Object.assign(turn, { content: box.value, ids: [], shades: null, edited: true });
      draw();
    } });
    turn.place.replaceWith(box);
    box.focus();
  }

  async function onSave() {
    const last = turns.findLastIndex((turn) => turn.role === "assistant" && turn.content.trim());
    if (last < 0 || running) { say("There is no answer to save.", true); return; }
    saving ??= submissionId(); // sent again after a failure, it is saved once
    await attempt(async () => {
      await post("/api/demonstrate", { messages: messages(last), response: turns[last].content.trim(), submission: saving });
      saving = null;
      say("Saved as a demonstration.");
    }, "Not saved. ");
  }

  function onClear() { running?.abort(); turns = []; draw(); }

  function messages(until = turns.length) {
    const before = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    return [...before, ...turns.slice(0, until).map(({ role, content }) => ({ role, content }))];
  }

  // running: what stops the answer in progress, if any.
  function setRunning(controller) {
    running = controller;
    send.disabled = Boolean(running);
    stop.disabled = !running;
    draw();
  }

  async function answer() {
    const asked = messages();
    const turn = { role: "assistant", content: "", ids: [], model: model.value, asked };
    turns.push(turn);
    setRunning(new AbortController());
    say("");
    try {
      const body = { model: model.value, messages: asked, temperature: temperature.valueAsNumber, stream: true, return_token_ids: true,
        seed: seed.value === "" ? null : Number(seed.value) };
      for await (const { choices: [{ delta, token_ids, finish_reason }] } of events("/v1/chat/completions", body, running.signal)) {
        turn.content += delta.content;
        turn.ids.push(...token_ids);
        turn.finish = finish_reason;
        turn.place.textContent = turn.content;
      }
    } catch (error) {
      if (error.name !== "AbortError") turn.error = error.message;
      turn.finish = "stopped";
    }
    setRunning(null);
    text.focus();
  }

  function onEdit(index) {
    if (running) return;
    text.value = turns[index].content;
    turns = turns.slice(0, index);
    draw();
    text.focus();
  }

  function onRegenerate(index) { if (running) return; turns = turns.slice(0, index); answer(); }

  function draw() {
    saving = null;
    legend.hidden = !shading.value;
    const steps = shading.value === "kl" ? ["0.03", "0.1", "0.3", "1", "3"] : ["1", "2", "3", "4", "5"]; // see `shade`
    legend.replaceChildren(shading.value === "kl" ? "KL in nats, about: " : "-log-prob in nats, about: ",
      ...steps.flatMap((step, i) => [el("span", { class: `token s${i + 1}` }, ` ${step} `), " "]));
    list.replaceChildren(...turns.map((turn, index) => {
      turn.place = el("p", { class: "text" }, turn.content);
      if (turn.role === "assistant" && turn.finish && shading.value && turn.ids.length) shade(turn);
      const tools = turn.role === "user"
        ? [button("Edit", () => onEdit(index))]
        : [button("Regenerate", () => onRegenerate(index)), button("Edit", () => onRewrite(turn)),
          button(`Rank ${RANKED} answers`, () => compare(messages(index), Array(RANKED).fill(model.value)))];
      const name = turn.role === "user" ? "you" : turn.model + (turn.edited ? " (edited)" : "") + (turn.finish === "length" ? " (cut at the length limit)" : "");
      return el("div", { class: `turn ${turn.role}` }, el("div", { class: "name" }, name), turn.place,
        turn.error ? el("p", { class: "bad", role: "alert" }, turn.error) : null,
        el("div", { class: "tools" }, ...(turn.role === "assistant" && !turn.finish ? [] : tools)));
    }));
  }

  async function shade(turn) {
    const asked = { model: turn.model, reference: reference.value, messages: turn.asked, token_ids: turn.ids };
    if (!await attempt(async () => { turn.shades ??= await post("/api/shading", asked); })) return;
    const { tokens, logprobs, kl } = turn.shades;
    turn.place.replaceChildren(...tokens.map((token, i) => {
      const value = shading.value === "kl" ? kl[i] : -logprobs[i];
      // nats of surprise, or half decades of KL from 0.01
      const level = Math.max(0, Math.min(5, Math.round(shading.value === "kl" ? 2 * Math.log10(value) + 5 : value)));
      const told = `log-prob ${logprobs[i].toFixed(2)}, KL ${kl[i].toFixed(3)} nats`;
      return el("span", { class: `token s${level}`, title: told }, token);
    }));
  }
}
