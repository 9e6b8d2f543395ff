// Responses to put in order, best first: by number keys, by clicking, or by dragging; with ties, ratings and flags.

import { el } from "./dom.js";

export class Ranking {
  constructor(responses, flags) {
    this.responses = responses;
    this.flagNames = flags;
    this.tiers = []; // best first; several ids in one are a tie
    this.ratings = {};
    this.flags = {};
    this.list = el("ol", { class: "cards" });
    this.draw();
  }

  load({ ranking, ratings, flags }) {
    this.tiers = (ranking ?? []).map((tier) => [...tier]);
    this.ratings = { ...ratings };
    this.flags = { ...flags };
    this.draw();
  }

  remove(id) {
    this.tiers = this.tiers.map((tier) => tier.filter((other) => other !== id)).filter((tier) => tier.length);
  }

  place(id) {
    this.remove(id);
    this.tiers.push([id]);
    this.draw(id);
  }

  tie(id) {
    this.remove(id);
    if (this.tiers.length) this.tiers.at(-1).push(id);
    else this.tiers.push([id]);
    this.draw(id);
  }

  tieUp(id) {
    const at = this.tiers.findIndex((tier) => tier.includes(id));
    if (at < 1) return;
    this.remove(id);
    this.tiers[at - 1].push(id);
    this.draw(id);
  }

  clear(id) {
    this.remove(id);
    this.draw(id);
  }

  // A digit places that response next; with Shift it ties with the one before; Backspace takes the last place back.
  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("textarea, input, select")) return false;
    const digit = /^Digit([1-9])$/.exec(event.code) ?? /^Numpad([1-9])$/.exec(event.code);
    if (digit) {
      const response = this.responses[Number(digit[1]) - 1];
      if (!response) return false;
      if (event.shiftKey) this.tie(response.id);
      else this.place(response.id);
      return true;
    }
    if (event.key === "Backspace" && this.tiers.length) {
      this.clear(this.tiers.at(-1).at(-1));
      return true;
    }
    return false;
  }

  get placed() {
    return this.tiers.flat().length;
  }

  draw(focus) {
    const order = this.tiers.flat();
    const rest = this.responses.map((r) => r.id).filter((id) => !order.includes(id));
    this.list.replaceChildren(...[...order, ...rest].map((id) => this.card(id)));
    if (focus) this.list.querySelector(`[data-id="${CSS.escape(focus)}"] .put`)?.focus();
    this.list.dispatchEvent(new CustomEvent("changed", { bubbles: true }));
  }

  card(id) {
    const number = this.responses.findIndex((r) => r.id === id) + 1;
    const at = this.tiers.findIndex((tier) => tier.includes(id));
    const name = `Response ${number}`;
    const handle = el("span", { class: "handle", title: "Drag", "aria-hidden": "true" }, "⠿");
    const put = el("button", { class: "small put", onclick: () => this.place(id) }, at < 0 ? "Next best" : "Move to the end");
    const card = el("li", { class: at < 0 ? "card" : "card placed", "data-id": id },
      el("div", { class: "head" }, handle, el("strong", {}, name), put,
        at > 0 ? el("button", { class: "small", onclick: () => this.tieUp(id) }, "Tie with above") : null,
        at >= 0 ? el("button", { class: "small", onclick: () => this.clear(id) }, "Unrank") : null,
        el("span", { class: "place" }, at < 0 ? "not ranked" : this.tiers[at].length > 1 ? `${at + 1} (tie)` : `${at + 1}`)),
      el("p", { class: "text" }, this.responses[number - 1].text || "(nothing)"),
      this.rating(id, name), this.flagBox(id, name));
    put.setAttribute("aria-label", `${name}: ${put.textContent}`);
    handle.addEventListener("pointerdown", (event) => this.drag(event, card, handle));
    return card;
  }

  rating(id, name) {
    const choices = [1, 2, 3, 4, 5, 6, 7].map((value) => {
      const input = el("input", { type: "radio", name: `rating-${id}`, value, checked: this.ratings[id] === value,
        onchange: () => { this.ratings[id] = value; } });
      input.setAttribute("aria-label", `${name}: quality ${value} of 7`);
      return el("label", {}, input, el("span", {}, String(value)));
    });
    return el("fieldset", { class: "rating" }, el("legend", {}, "Quality, 1 worst to 7 best"), ...choices);
  }

  flagBox(id, name) {
    const chosen = new Set(this.flags[id] ?? []);
    const boxes = this.flagNames.map((flag) => el("label", {}, el("input", { type: "checkbox", checked: chosen.has(flag),
      onchange: (event) => {
        if (event.target.checked) chosen.add(flag);
        else chosen.delete(flag);
        this.flags[id] = [...chosen];
      } }), ` ${flag.replaceAll("_", " ")}`));
    const summary = el("summary", {}, "Flags");
    summary.setAttribute("aria-label", `${name}: flags`);
    return el("details", { open: chosen.size > 0 }, summary, el("div", { class: "flags" }, ...boxes));
  }

  // The card follows the pointer among the others; where it is let go, it has a place of its own, as has what is above it.
  drag(event, card, handle) {
    event.preventDefault();
    handle.setPointerCapture(event.pointerId);
    card.classList.add("dragged");
    const move = (moved) => {
      const others = [...this.list.children].filter((other) => other !== card);
      const below = others.find((other) => {
        const box = other.getBoundingClientRect();
        return moved.clientY < box.top + box.height / 2;
      });
      if (below ? card.nextElementSibling !== below : this.list.lastElementChild !== card) this.list.insertBefore(card, below ?? null);
    };
    const drop = () => {
      handle.removeEventListener("pointermove", move);
      const shown = [...this.list.children].map((other) => other.dataset.id);
      const id = card.dataset.id;
      const above = shown.slice(0, shown.indexOf(id));
      this.remove(id);
      const ranked = new Set(this.tiers.flat());
      for (const other of above) if (!ranked.has(other)) this.tiers.push([other]);
      const at = this.tiers.findLastIndex((tier) => tier.some((other) => above.includes(other)));
      this.tiers.splice(at + 1, 0, [id]);
      this.draw(id);
    };
    handle.addEventListener("pointermove", move);
    handle.addEventListener("pointerup", drop, { once: true });
    handle.addEventListener("pointercancel", drop, { once: true });
  }

  verdict(name, submission, seconds) {
    return { name, submission, ranking: this.tiers, ratings: this.ratings, flags: this.flags, seconds };
  }
}
