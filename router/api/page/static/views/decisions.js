// The records of router and KV manager, newest first, with filters.

import { load } from "../lib/data.js";
import { card, h, replace, requestLink, table } from "../lib/dom.js";
import { clock, figure, seconds, words } from "../lib/format.js";

const KINDS = ["", "admission", "eviction", "grant", "migration", "outcome", "preemption", "prefetch", "queued", "rejection", "reset", "routing", "shortfall"];
const SERVICES = { "router and manager": ["router", "kvmanager"], router: ["router"], "KV manager": ["kvmanager"] };
const PAGE = 60;

export class Decisions {
  constructor(kind = "") {
    this.open = new Set();
    this.older = [];
    this.pages = null;
    this.rows = [];
    const select = (id, names) => h("select", { id, onchange: () => this.changed() }, names.map((each) => h("option", { value: each }, each === "" ? "all" : each)));
    const input = (id, size) => h("input", { id, size, maxlength: 128, spellcheck: "false", onchange: () => this.changed() });
    this.fields = { service: select("service", Object.keys(SERVICES)), kind: select("kind", KINDS), request: input("request", 24), worker: input("worker", 12), tenant: input("tenant", 12) };
    if (KINDS.includes(kind)) this.fields.kind.value = kind;
    const labels = { service: "Service", kind: "Kind", request: "Request", worker: "Worker", tenant: "Tenant" };
    const form = h("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); this.changed(); } }, Object.entries(this.fields).map(([name, field]) => h("label", {}, labels[name], field)));
    this.list = h("div");
    this.note = h("p", { class: "note" });
    this.more = h("button", { type: "button", class: "wide", onclick: () => this.before() }, "Older records");
    this.place = h("div", {}, h("div", { class: "page-head" }, h("h1", {}, "Decisions"), this.note), form, card("Records", { class: "records" }, this.list, this.more));
  }

  wanted() {
    const { kind, request, worker, tenant } = this.fields;
    return { kind: kind.value, request: request.value.trim(), worker: worker.value.trim(), tenant: tenant.value.trim(), limit: PAGE };
  }

  async changed() {
    this.older = [];
    this.pages = null;
    try {
      await this.refresh();
      document.getElementById("trouble")?.remove();
    } catch (error) {
      replace(this.list, h("p", { class: "banner" }, error.message));
    }
  }

  async refresh() {
    const services = SERVICES[this.fields.service.value];
    const found = await Promise.all(services.map((service) => load("decisions", { service, ...this.wanted() })));
    if (!this.older.length) this.pages = services.map((service, at) => [service, found[at].page]);
    const silent = Math.max(...found.map((each) => each.silent_routers));
    const since = Math.max(...found.map((each) => each.complete_since));
    this.note.textContent = `kept since ${clock(since)}${silent ? `; ${silent} routers did not answer` : ""}`;
    this.rows = found.flatMap((each) => each.records);
    this.draw();
  }

  async before() {
    const open = (this.pages ?? []).filter(([, page]) => page);
    const found = await Promise.all(open.map(([service, page]) => load("decisions", { service, page, ...this.wanted() })));
    this.older.push(...found.flatMap((each) => each.records));
    this.pages = open.map(([service], at) => [service, found[at].page]);
    this.draw();
  }

  draw() {
    const rows = new Map([...this.rows, ...this.older].map((each) => [`${each.service} ${each.id}`, each]));
    const ordered = [...rows.values()].sort((one, other) => other.at - one.at);
    const columns = [
      { name: "Time", class: "time", cell: (each) => this.toggle(each) },
      { name: "Service", cell: (each) => (each.service === "router" ? "router" : "KV manager") },
      { name: "Kind", cell: (each) => h("span", { class: `kind k-${each.kind}` }, each.kind) },
      { name: "Request", cell: (each) => (each.request ? requestLink(each.request, `${each.service}-${each.id}`) : "–") },
      { name: "Worker", cell: (each) => each.worker || "–" },
      { name: "Choice and reasons", class: "wide-cell", cell: (each) => this.what(each) },
    ];
    const list = table(columns, ordered, "No record matches.", { row: (each) => ({ class: this.open.has(each.id) ? "open" : "" }) });
    replace(this.list, list);
    this.more.hidden = !(this.pages ?? []).some(([, page]) => page);
  }

  toggle(record) {
    const is = this.open.has(record.id);
    return h("button", { type: "button", class: "toggle", "data-key": `toggle-${record.service}-${record.id}`, "aria-expanded": String(is), onclick: () => { if (is) this.open.delete(record.id); else this.open.add(record.id); this.draw(); } }, clock(record.at, true));
  }

  what(record) {
    const short = [record.chosen, ...record.reasons].filter(Boolean).join(" · ");
    if (!this.open.has(record.id)) return h("span", { class: "clip" }, short);
    return h("div", {}, h("span", {}, short), details(record));
  }
}

function details(record) {
  const pairs = [
    ...Object.entries(record.figures).map(([name, value]) => [words(name), figure(value)]),
    ...(record.victim ? [["victim", requestLink(record.victim, `v-${record.id}`)]] : []),
    ...(record.beneficiary ? [["beneficiary", requestLink(record.beneficiary, `b-${record.id}`)]] : []),
    ...(record.tenant ? [["tenant", record.tenant]] : []),
    ...(record.trace ? [["trace", h("code", {}, record.trace)]] : []),
  ];
  const candidates = record.candidates.map((each) => h("li", {}, h("b", {}, each.name), " ", each.rejected || [each.cost === null ? "" : seconds(each.cost), ...Object.entries(each.terms).map(([name, value]) => `${words(name)} ${record.kind === "routing" ? seconds(value) : figure(value)}`)].filter(Boolean).join(" · ")));
  return h("div", { class: "details" }, h("dl", {}, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))), candidates.length ? h("ul", {}, candidates) : null);
}
