// The frame of the page: which view is shown, how often it is asked for, light and dark, keys.

import { h, replace } from "./lib/dom.js";
import { Blocks } from "./views/blocks.js";
import { Decisions } from "./views/decisions.js";
import { Overview } from "./views/overview.js";
import { Request } from "./views/request.js";
import { Requests } from "./views/requests.js";
import { Routing } from "./views/routing.js";

const EVERY_MS = 2000;
const VIEWS = { overview: Overview, requests: Requests, routing: Routing, blocks: Blocks, decisions: Decisions, request: Request };
const TABS = ["overview", "requests", "routing", "blocks", "decisions"];
const main = document.getElementById("main");
const state = document.getElementById("state");

let shown = null;
let timer = 0;
let paused = false;

function title(name) {
  return name[0].toUpperCase() + name.slice(1);
}

function parts() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return [VIEWS[name] ? name : "overview", rest.map(decodeURIComponent)];
}

function nav(name) {
  const current = name === "request" ? "requests" : name;
  const links = TABS.map((each, index) => h("a", { href: `#${each}`, "data-key": each, title: `${title(each)} (${index + 1})`, "aria-current": each === current ? "page" : null }, title(each)));
  replace(document.getElementById("nav"), links);
}

async function refresh(view) {
  clearTimeout(timer);
  try {
    await view.refresh();
    if (view !== shown) return;
    document.getElementById("trouble")?.remove();
    state.textContent = paused ? "paused" : "live";
    state.className = paused ? "state" : "state live";
  } catch (error) {
    if (view !== shown) return;
    state.textContent = "no answer";
    state.className = "state lost";
    fail(error.message);
  }
  document.body.dataset.ready = view.name;
  if (!paused && view.live !== false) timer = setTimeout(() => refresh(view), EVERY_MS);
}

function fail(message) {
  const banner = document.getElementById("trouble") ?? h("p", { id: "trouble", class: "banner", role: "alert" });
  banner.textContent = message;
  main.prepend(banner);
}

function open() {
  const [name, rest] = parts();
  shown?.close?.();
  delete document.body.dataset.ready;
  shown = new VIEWS[name](...rest);
  shown.name = name;
  document.title = `${title(name)} · Quire`;
  nav(name);
  replace(main, shown.place);
  scrollTo(0, 0);
  refresh(shown);
}

function pause() {
  paused = !paused;
  const button = document.getElementById("pause");
  button.textContent = paused ? "Go on" : "Pause";
  button.setAttribute("aria-pressed", String(paused));
  refresh(shown);
}

function turn() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  shown.recolour?.();
}

const asked = new URLSearchParams(location.search).get("theme");
if (asked === "light" || asked === "dark") document.documentElement.dataset.theme = asked;
document.getElementById("pause").addEventListener("click", pause);
document.getElementById("theme").addEventListener("click", turn);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown.recolour?.());
addEventListener("hashchange", open);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "p") pause();
  else if (event.key === "t") turn();
  else if (TABS[event.key - 1]) location.hash = TABS[event.key - 1];
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
open();
