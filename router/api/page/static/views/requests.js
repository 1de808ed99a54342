// The requests that ended last.

import { load } from "../lib/data.js";
import { card, h, replace, requestLink, table } from "../lib/dom.js";
import { clock, count, percent, seconds, words } from "../lib/format.js";

const SORTS = {
  newest: (each) => -each.at,
  "first token": (each) => -(each.first_token_s ?? 0),
  "whole time": (each) => -each.total_s,
};

export class Requests {
  constructor() {
    this.sort = "newest";
    this.rows = [];
    const options = Object.keys(SORTS).map((each) => h("option", {}, each));
    const sort = h("select", { id: "sort", onchange: (event) => this.sorted(event.target.value) }, options);
    const id = h("input", { id: "find", placeholder: "request id", maxlength: 150, size: 36, spellcheck: "false" });
    const form = h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); if (id.value.trim()) location.hash = `request/${encodeURIComponent(id.value.trim())}`; } },
      h("label", {}, "Request", id), h("button", { type: "submit" }, "Open"), h("span", { class: "grow" }), h("label", {}, "Order", sort));
    this.list = h("div");
    this.place = h("div", {}, h("div", { class: "page-head" }, h("h1", {}, "Requests"), h("p", { class: "note" }, "the last 200 that ended")), form, card("Ended", {}, this.list));
  }

  async refresh() {
    this.rows = (await load("requests", { limit: 200 })).requests;
    this.draw();
  }

  sorted(name) {
    this.sort = name;
    this.draw();
  }

  draw() {
    const order = SORTS[this.sort];
    const rows = [...this.rows].sort((one, other) => order(one) - order(other));
    const columns = [
      { name: "Ended", cell: (each) => clock(each.at), class: "time" },
      { name: "Request", cell: (each) => requestLink(each.request) },
      { name: "Tenant", cell: (each) => each.tenant || "–" },
      { name: "Worker", cell: (each) => each.worker || "–" },
      { name: "Prompt", number: true, cell: (each) => count(each.prompt_tokens) },
      { name: "Cached", number: true, cell: (each) => percent(each.prompt_tokens ? each.cached_tokens / each.prompt_tokens : null) },
      { name: "Output", number: true, cell: (each) => count(each.output_tokens) },
      { name: "First token", number: true, cell: (each) => seconds(each.first_token_s) },
      { name: "Took", number: true, cell: (each) => seconds(each.total_s) },
      { name: "How", cell: (each) => h("span", { class: each.failure ? "bad" : "" }, words(each.ended.toLowerCase()), each.preemptions ? `, preempted ${count(each.preemptions)}×` : "", each.moves ? `, moved ${count(each.moves)}×` : "") },
    ];
    replace(this.list, table(columns, rows, "No request has ended yet."));
  }
}
