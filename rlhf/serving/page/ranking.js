// Responses to put in order, best first: by number keys, by clicking, or by dragging; with ties, ratings and flags.
// The cards never move. The strip has a chip per response in the order of the ranking, then a divider, then those not ranked.

import { button as plainButton, checkbox, checked, differenceOf, el, stopwatch, submissionId, textOf } from "./dom.js";

const button = (label, onclick, more = {}) => plainButton(label, onclick, { class: "small", ...more });

export class Ranking {
  constructor(responses, { flags }) {
    this.responses = responses;
    this.numbers = new Map(responses.map((response, i) => [response.id, i + 1]));
    this.seconds = stopwatch();
    this.flags = flags; // by heading, [name, what it means]
    this.strip = el("ol", { class: "strip", "aria-label": "Ranking, best first" });
    this.list = el("ol", { class: "cards", "aria-label": "Responses" });
    this.current = responses[0].id; // what the keys for ratings and flags are about
    this.prefix = "";
    this.group = Math.random(); // Rank and Compare both have a response "a"
    this.load();
  }

  load({ ranking, ratings, flags } = {}) {
    this.tiers = (ranking ?? []).map((tier) => [...tier]); // best first; several ids in one are a tie
    this.base = null; // whose words the others are compared with
    this.ratings = { ...ratings };
    this.flagged = { ...flags };
    this.list.replaceChildren(...this.responses.map((response) => this.card(response)));
    this.draw();
  }

  // Take a response out of its place, and put it into another one, if any.
  move(id, put) {
    this.tiers = this.tiers.map((tier) => tier.filter((other) => other !== id)).filter((tier) => tier.length);
    put?.(this.tiers);
    this.draw(id);
  }

  place(id, tie = false) {
    this.move(id, (tiers) => { if (tie && tiers.length) tiers.at(-1).push(id); else tiers.push([id]); });
  }

  tieUp(id) {
    const at = this.tierOf(id);
    this.move(id, (tiers) => tiers[at - 1].push(id));
  }

  tierOf(id) { return this.tiers.findIndex((tier) => tier.includes(id)); }

  show(id) { this.draw(id); this.cardOf(id).scrollIntoView({ block: "nearest", inline: "nearest" }); }

  cardOf(id) { return this.list.querySelector(`[data-id="${CSS.escape(id)}"]`); }

  // A digit places that response next; with Shift it ties with the one before; Backspace takes the last place back.
  // r and a digit rate the current response, f and a letter flag it, d marks what others have and it has not; j and k go to the next and the one before.
  onKey(event) {
    const digit = Number(/^(?:Digit|Numpad)([1-9])$/.exec(event.code)?.[1] ?? 0);
    const prefix = this.prefix;
    this.prefix = "";
    if (prefix === "r" && digit && digit <= 7) this.cardOf(this.current).querySelectorAll(".rating input")[digit - 1].click();
    else if (prefix === "f" && /^[a-z]$/.test(event.key)) {
      const box = this.cardOf(this.current).querySelectorAll(".flags input")[event.key.charCodeAt(0) - 97];
      if (box) box.closest("details").open = true;
      box?.click();
    } else if (digit && this.responses[digit - 1]) this.place(this.responses[digit - 1].id, event.shiftKey);
    else if (event.key === "Backspace" && this.tiers.length) this.move(this.tiers.at(-1).at(-1));
    else if (event.key === "d") this.compareWith(this.current);
    else if (event.key === "r" || event.key === "f") this.prefix = event.key;
    else if (event.key === "j" || event.key === "k") {
      const at = this.responses.findIndex((r) => r.id === this.current) + (event.key === "j" ? 1 : -1);
      if (this.responses[at]) this.show(this.responses[at].id);
    } else return false;
    return true;
  }

  // Mark in the other responses the words that this one does not have; the same again shows them as they are.
  compareWith(id) {
    this.base = this.base === id ? null : id;
    const base = this.responses.find((one) => one.id === this.base);
    for (const { id: name, text } of this.responses) {
      const card = this.cardOf(name);
      card.querySelector(".text").replaceWith(base && name !== this.base ? differenceOf(text, base.text) : textOf(text || "(nothing)"));
      card.querySelector(".differ").setAttribute("aria-pressed", String(name === this.base));
    }
  }

  get placed() { return this.tiers.flat().length; }
  get state() { return { ranking: this.tiers, ratings: this.ratings, flags: this.flagged }; }
  verdict(name) { return { name, submission: this.submission, ...this.state, seconds: this.seconds() }; }

  changed() {
    this.submission = submissionId(); // another answer is another submission
    this.onchange?.();
  }

  draw(current) {
    this.current = current ?? this.current;
    const places = new Map(this.tiers.flatMap((tier, at) => tier.map((id) => [id, tier.length > 1 ? `${at + 1} (tie)` : `${at + 1}`])));
    const chip = (id, text) => {
      const made = el("li", { class: "chip", "data-id": id, title: `Response ${this.numbers.get(id)}: drag, or click to see it` }, text);
      made.addEventListener("pointerdown", (event) => this.drag(event, made));
      return made;
    };
    this.strip.replaceChildren(
      ...this.tiers.flatMap((tier) => tier.map((id, i) => chip(id, `${i ? "= " : ""}${this.numbers.get(id)}`))),
      el("li", { class: "divider" }, places.size ? "not ranked:" : "drag here the best · not ranked:"),
      ...this.responses.filter((r) => !places.has(r.id)).map((r) => chip(r.id, String(this.numbers.get(r.id)))));
    for (const card of this.list.children) {
      const { id } = card.dataset, at = this.tierOf(id);
      card.className = `card${at < 0 ? "" : " placed"}${id === this.current ? " current" : ""}`;
      card.querySelector(".place").textContent = places.get(id) ?? "not ranked";
      const [, tie, unrank] = card.querySelectorAll(".head button");
      tie.classList.toggle("off", at < 1); // invisible, so that the text below does not move
      unrank.classList.toggle("off", at < 0);
    }
    this.changed();
  }

  card({ id, text }) {
    const name = `Response ${this.numbers.get(id)}`;
    return el("li", { "data-id": id, onclick: () => { if (this.current !== id) this.draw(id); } },
      el("div", { class: "head" }, el("strong", {}, name), el("span", { class: "place" }),
        button("Next best", () => this.place(id), { class: "small put", "aria-label": `${name}: Next best` }),
        button("Tie with above", () => this.tieUp(id)),
        button("Unrank", () => this.move(id))),
      textOf(text || "(nothing)"), this.rating(id, name), this.flagBox(id, name),
      button("Differences", () => this.compareWith(id), { class: "small differ", "aria-label": `${name}: differences`,
        title: "Mark in the others the words that this one does not have (d)" }));
  }

  rating(id, name) {
    const choices = [1, 2, 3, 4, 5, 6, 7].map((value) => el("label", {},
      el("input", { type: "radio", name: `rating-${this.group}-${id}`, value, checked: this.ratings[id] === value,
        "aria-label": `${name}: quality ${value} of 7`, onchange: () => { this.ratings[id] = value; this.changed(); } }), el("span", {}, value)));
    return el("fieldset", { class: "rating" }, el("legend", {}, "Quality, 1 worst to 7 best"), ...choices);
  }

  flagBox(id, name) {
    const chosen = this.flagged[id] ?? [];
    let letter = 97; // of a
    const box = ([flag, meaning]) => el("label", {}, checkbox(flag, chosen.includes(flag)), " ",
      letter <= 122 ? el("kbd", {}, String.fromCharCode(letter++)) : "", ` ${flag.replaceAll("_", " ")}: `, el("span", { class: "name" }, meaning));
    const boxes = el("div", { class: "flags", onchange: () => { this.flagged[id] = checked(boxes); this.changed(); } },
      ...Object.entries(this.flags).flatMap(([heading, flags]) => [el("strong", {}, heading), ...flags.map(box)]));
    return el("details", { open: chosen.length > 0 }, el("summary", { "aria-label": `${name}: flags` }, "Flags"), boxes);
  }

  // The other chips move past the dragged one: an element that is put into the document anew loses the pointer. Let go before the
  // divider it has a place of its own, or between tied ones theirs; after the divider it is not ranked.
  drag(event, chip) {
    event.preventDefault();
    chip.setPointerCapture(event.pointerId);
    chip.classList.add("dragged");
    const { id } = chip.dataset;
    let moved = false;
    chip.onpointermove = ({ clientX, clientY }) => {
      const others = [...this.strip.children].filter((other) => other !== chip);
      const at = others.findIndex((other) => {
        const box = other.getBoundingClientRect();
        return clientY < box.top || (clientY < box.bottom && clientX < box.left + box.width / 2);
      });
      const before = others[at] ?? null;
      if (chip.nextElementSibling === before) return;
      moved = true;
      chip.before(...others.slice(0, before ? at : others.length));
      if (before) chip.after(...others.slice(at));
    };
    chip.onpointerup = () => {
      if (!moved) { this.show(id); return; }
      const shown = [...this.strip.children].map((other) => other.dataset.id); // the divider has none
      const at = shown.indexOf(id);
      const ranked = at < shown.indexOf(undefined);
      this.move(id, (tiers) => {
        const tier = this.tierOf(shown[at - 1]);
        if (ranked && tiers[tier]?.includes(shown[at + 1])) tiers[tier].push(id);
        else if (ranked) tiers.splice(tier + 1, 0, [id]);
      });
    };
    chip.onpointercancel = () => this.draw();
  }
}
