// The page's start: the session of a labeler's link, and the five tabs.

import { el, get, post, say } from "./dom.js";
import { makeChat } from "./chat.js";
import { makeCompare } from "./compare.js";
import { makeDemonstrate } from "./demonstrate.js";
import { makeNext } from "./next.js";
import { makeRank } from "./rank.js";

const NAMES = ["chat", "compare", "rank", "demonstrate", "next"];
const MAKERS = { chat: makeChat, compare: makeCompare, rank: makeRank, demonstrate: makeDemonstrate, next: makeNext };
const panels = {};

async function openSession() {
  const secret = location.hash.slice(1);
  if (!secret) return;
  history.replaceState(null, "", location.pathname); // the secret stays in no address bar
  await post("/api/session", { token: secret });
}

function select(name) {
  for (const one of NAMES) {
    const tab = document.getElementById(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === name));
    tab.tabIndex = one === name ? 0 : -1;
    document.getElementById(one).hidden = one !== name;
  }
  panels[name]?.show?.();
}

function onTabKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const at = NAMES.findIndex((name) => event.target.id === `tab-${name}`);
  const next = NAMES[(at + step + NAMES.length) % NAMES.length];
  document.getElementById(`tab-${next}`).focus();
  select(next);
}

async function start() {
  try {
    await openSession();
    const me = await get("/api/me");
    document.getElementById("who").textContent = me.labeler ? `labeler: ${me.labeler}` : "";
    for (const name of NAMES) panels[name] = MAKERS[name](document.getElementById(name), me);
    for (const name of NAMES) document.getElementById(`tab-${name}`).addEventListener("click", () => select(name));
    document.getElementById("tabs").addEventListener("keydown", onTabKey);
    select(me.tasks && me.labeler && me.labeler !== "local" ? "rank" : "chat");
    document.body.dataset.ready = "true";
  } catch (error) {
    say(error.message, true);
    document.getElementById("chat").append(el("p", {}, "Open the link that you were given."));
  }
}

start();
