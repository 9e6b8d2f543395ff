// The page's start: the session of a labeler's link, and the tabs.

import { button, el, get, post, say } from "./dom.js";
import { makeChat } from "./chat.js";
import { makeCompare } from "./compare.js";
import { makeDemonstrate } from "./demonstrate.js";
import { makeManage } from "./manage.js";
import { makeRank } from "./rank.js";

const TABS = { chat: ["Chat", makeChat], compare: ["Compare", makeCompare], rank: ["Rank", makeRank],
  demonstrate: ["Demonstrate", makeDemonstrate], manage: ["Manage", makeManage] };
let NAMES = [];
const panels = {};

function select(name) {
  for (const one of NAMES) {
    const tab = document.getElementById(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === name));
    tab.tabIndex = one === name ? 0 : -1;
    document.getElementById(one).hidden = one !== name;
  }
  panels[name]?.show?.();
}

// A click on a button leaves the focus where it is, so that keys still rank and Enter still saves.
document.addEventListener("mousedown", (event) => { if (event.target.closest("button, summary")) event.preventDefault(); });

// Keys rank in the tab that is shown. Words of a text field are none; a radio button or a checkbox that was clicked takes no letters.
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("textarea, select, input:not([type=radio], [type=checkbox])");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const shown = NAMES.find((name) => !document.getElementById(name).hidden);
  if (event.key === "Enter" && event.target.closest("button, summary, a")) return;
  if (panels[shown]?.onKey?.(event)) event.preventDefault();
});

document.getElementById("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const at = NAMES.findIndex((name) => event.target.id === `tab-${name}`);
  const next = NAMES[(at + step + NAMES.length) % NAMES.length];
  document.getElementById(`tab-${next}`).focus();
  select(next);
});

async function start() {
  try {
    const token = location.hash.slice(1);
    history.replaceState(null, "", location.pathname); // the secret stays in no address bar
    if (token) sessionStorage.setItem("tab", (await post("/api/session", { token })).labeler);
    const me = await get("/api/me");
    sessionStorage.setItem("tab", me.tab); // sent with every request: another link that is opened in this browser must not change it
    document.getElementById("who").textContent = me.labeler ?? "";
    NAMES = me.tabs;
    for (const name of NAMES) {
      const [title, make] = TABS[name];
      const panel = el("section", { id: name, role: "tabpanel", "aria-labelledby": `tab-${name}`, hidden: true });
      document.getElementById("tabs").append(button(title, () => select(name), { id: `tab-${name}`, role: "tab", "aria-controls": name }));
      document.querySelector("main").append(panel);
      panels[name] = make(panel, me, (...of) => { select("compare"); panels.compare.start(...of); });
    }
    select(NAMES.includes("rank") && me.tasks && me.labeler && me.labeler !== "local" ? "rank" : NAMES[0]);
    document.body.dataset.ready = "true";
  } catch (error) {
    say(error.message, true);
    document.querySelector("main").append(el("p", {}, "Open the link that you were given."));
  }
}

addEventListener("hashchange", () => location.reload()); // another link in this tab
start();
