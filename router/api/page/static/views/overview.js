// What the suite does now, and its last ten minutes.

import { Chart } from "../lib/chart.js";
import { load } from "../lib/data.js";
import { card, h, legend, replace, requestLink, stack, table } from "../lib/dom.js";
import { count, percent, rate, seconds, title, words } from "../lib/format.js";

const STATES = [
  ["in_use", "In use", "c-sealed"],
  ["leased", "Leased ahead", "c-leased"],
  ["cached", "Cached", "c-cached"],
  ["free", "Free", "c-free"],
];

const last = (column) => (column.length ? column[column.length - 1] : null);

function lastKnown(column) {
  for (let at = column.length - 1; at >= 0; at -= 1) if (column[at] !== null) return column[at];
  return null;
}

export class Overview {
  constructor() {
    this.charts = {
      tokens: new Chart([{ name: "tokens/s", mark: "m-accent", colour: "--accent", fill: "--accent-soft" }], rate),
      first: new Chart([{ name: "p50", mark: "m-accent", colour: "--accent" }, { name: "p95", mark: "m-amber", colour: "--amber" }], seconds),
      gap: new Chart([{ name: "p50", mark: "m-accent", colour: "--accent" }, { name: "p95", mark: "m-amber", colour: "--amber" }], seconds),
      queue: new Chart([{ name: "running", mark: "m-accent", colour: "--accent", fill: "--accent-soft" }, { name: "waiting", mark: "m-rose", colour: "--rose" }], count, { least: 1 }),
    };
    const { tokens, first, gap, queue } = this.charts;
    const chart = (title, each) => card(title, { class: "chart-card" }, each.legend(), each.place);
    this.head = h("div", { class: "page-head" });
    this.figures = h("dl", { class: "figures card" });
    this.workers = h("div");
    this.hits = h("div");
    this.memory = h("div");
    this.slow = h("div");
    // They are shown once there is something in them.
    this.hitsCard = card("Prompt tokens", { note: "of the last 200 requests", hidden: true }, this.hits);
    this.memoryCard = card("Memory for live sequences", { note: "slots for K and V", hidden: true }, this.memory);
    this.slowCard = card("Slowest first tokens", { note: "of the last 200 requests", hidden: true }, this.slow);
    this.place = h(
      "div",
      {},
      this.head,
      this.figures,
      h("div", { class: "grid four" }, chart("Output", tokens), chart("Time to first token", first), chart("Time between tokens", gap), chart("Sequences", queue)),
      h("div", { class: "grid two" }, card("Blocks by state", {}, this.workers), this.hitsCard),
      h("div", { class: "grid two" }, this.memoryCard, this.slowCard),
    );
  }

  async refresh() {
    const found = await load("overview");
    const history = found.history;
    const { tokens, first, gap, queue } = this.charts;
    tokens.update([history.at, history.tokens_per_s]);
    first.update([history.at, history.first_p50, history.first_p95]);
    gap.update([history.at, history.gap_p50, history.gap_p95]);
    queue.update([history.at, history.running, history.waiting]);
    for (const each of Object.values(this.charts)) each.read(null);
    this.showHead(found);
    this.showFigures(found);
    this.showWorkers(found.workers, found.pages, found.groups);
    this.showHits(found.hits);
    this.showMemory(found);
    this.showSlow(found.slowest);
  }

  showHead(found) {
    const workers = found.workers.length;
    const about = `${found.model} · ${workers} worker${workers === 1 ? "" : "s"} · version ${found.version}`;
    replace(this.head, h("h1", {}, "Overview"), h("p", { class: "note" }, about), ...found.troubles.map((each) => h("p", { class: "banner" }, each)));
  }

  showFigures(found) {
    const { history, hits } = found;
    const stored = last(history.stored) ?? 0;
    const waste = (slots) => (stored && slots ? slots / stored - 1 : null);
    const figure = (name, value, more) => h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "more" }, more));
    replace(
      this.figures,
      figure("Output", rate(last(history.tokens_per_s)), "tokens/s"),
      figure("First token", seconds(lastKnown(history.first_p50)), `p95 ${seconds(lastKnown(history.first_p95))}`),
      figure("Between tokens", seconds(lastKnown(history.gap_p50)), `p95 ${seconds(lastKnown(history.gap_p95))}`),
      figure("Running", count(found.running), `${count(found.waiting)} waiting`),
      figure("Hit rate", percent(hits.prompt_tokens ? hits.cached_tokens / hits.prompt_tokens : null), "of prompt tokens"),
      figure("Waste", percent(waste(last(history.paged))), `contiguous ${percent(waste(last(history.context)))}`),
    );
  }

  showWorkers(workers, pages, groups) {
    const rows = workers.map((each) => {
      const known = each.in_use !== null;
      const parts = STATES.map(([name, title, mark]) => ({ name: title, mark, value: each[name] ?? 0, title: `${title}: ${count(each[name])}` }));
      const label = known ? parts.map((part) => part.title).join(", ") : "the KV manager does not answer";
      return h(
        "div",
        { class: "worker" },
        h("div", { class: "worker-head" }, h("a", { href: `#blocks/${encodeURIComponent(each.worker)}`, class: "id", "data-key": `worker-${each.worker}` }, each.worker), h("span", { class: each.state === "connected" ? "note" : "bad" }, words(each.state)), each.disaggregation ? h("span", { class: "note" }, words(each.disaggregation)) : "", h("span", { class: "grow" }), h("span", { class: "note" }, `${count(each.running)} running, ${count(each.waiting)} waiting, ${rate(each.tokens_per_s)} tokens/s`)),
        known ? stack(parts, each.blocks, label) : h("p", { class: "empty" }, label),
        known ? h("p", { class: "counts" }, STATES.map(([name, title]) => h("span", {}, `${title} `, h("b", {}, count(each[name])))), h("span", {}, "Evicted ", h("b", {}, count(each.evictions))), h("span", {}, "Preempted ", h("b", {}, count(each.preemptions)))) : null,
        each.host_frames ? h("p", { class: "counts" }, h("span", {}, "Host memory ", h("b", {}, `${count(each.host_held)} of ${count(each.host_frames)} blocks`)), h("span", {}, "Stored ", h("b", {}, count(each.host_stores))), h("span", {}, "Loaded ", h("b", {}, count(each.host_loads))), h("span", {}, "Dropped ", h("b", {}, count(each.host_drops)))) : null,
        each.disk_frames || each.disk_closed ? h("p", { class: "counts" }, h("span", {}, "Disk ", each.disk_closed ? h("b", { class: "bad" }, "given up") : h("b", {}, `${count(each.disk_held)} of ${count(each.disk_frames)} blocks`)), h("span", {}, "Saved ", h("b", {}, count(each.disk_stores))), h("span", {}, "Fetched ", h("b", {}, count(each.disk_loads))), h("span", {}, "Lost ", h("b", {}, count(each.disk_lost))), h("span", {}, "Not saved ", h("b", {}, count(each.unsaved)))) : null,
        each.fetches ? h("p", { class: "counts" }, h("span", {}, "Waited for a fetch ", h("b", {}, count(each.fetches))), each.fetching ? h("span", {}, "Waiting now ", h("b", {}, count(each.fetching))) : null, each.peer_loads ? h("span", {}, "From other workers ", h("b", {}, count(each.peer_loads))) : null, Object.entries(each.transfer_ends).filter(([end, times]) => end !== "done" && times).map(([end, times]) => h("span", {}, `${title(end)} `, h("b", {}, count(times))))) : null,
        each.ahead || Object.keys(each.ahead_loads).length ? h("p", { class: "counts" }, each.ahead ? h("span", {}, "Prefixes on the way ahead of need ", h("b", {}, count(each.ahead))) : null, Object.entries(each.ahead_loads).map(([kind, blocks]) => h("span", {}, `Ahead by ${kind} `, h("b", {}, count(blocks))))) : null,
        each.groups.length ? h("p", { class: "counts" }, groups.map(({ name }, at) => h("span", {}, `${title(name)} `, h("b", {}, `${count(each.groups[at]?.in_use)} blocks in use, ${count(each.groups[at]?.cached)} cached`)))) : null,
      );
    });
    replace(this.workers, rows.length ? [legend(STATES.map(([, title, mark]) => [title, mark])), pages ? h("p", { class: "note" }, pages) : null, ...rows] : h("p", { class: "empty" }, "No worker is known."));
  }

  showHits(hits) {
    this.hitsCard.hidden = !hits.prompt_tokens;
    if (!hits.prompt_tokens) return;
    const rows = [{ reason: "cached", tokens: hits.cached_tokens, mark: "c-cached" }, ...hits.missed.map((each) => ({ ...each, mark: "c-missed" }))];
    const counted = rows.reduce((sum, each) => sum + each.tokens, 0);
    if (counted < hits.prompt_tokens) rows.push({ reason: "last block, always computed", tokens: hits.prompt_tokens - counted, mark: "c-leased" });
    replace(
      this.hits,
      h("div", { class: "bars" }, rows.map((each) => [h("span", { class: "bar-name" }, words(each.reason)), stack([{ name: each.reason, mark: each.mark, value: each.tokens }], hits.prompt_tokens, `${words(each.reason)}: ${count(each.tokens)} tokens`), h("b", {}, percent(each.tokens / hits.prompt_tokens)), h("span", { class: "note number" }, count(each.tokens))])),
    );
  }

  showMemory(found) {
    const { history, workers } = found;
    const [stored, paged, contiguous, context] = ["stored", "paged", "contiguous", "context"].map((name) => last(history[name]) ?? 0);
    this.memoryCard.hidden = !contiguous;
    if (!contiguous) return;
    const leased = Math.round((workers.reduce((sum, each) => sum + (each.leased ?? 0), 0) * found.block_size) / found.block_pages);
    const row = (name, slots, extra) => [
      h("span", { class: "bar-name" }, name),
      stack([{ name: "tokens", mark: "c-sealed", value: stored }, { name: "not filled", mark: "c-missed", value: slots - stored }], context, `${name}: ${count(slots)} slots, ${count(stored)} filled`),
      h("b", {}, percent(stored ? slots / stored - 1 : null)),
      h("span", { class: "note number" }, extra ?? count(slots)),
    ];
    replace(
      this.memory,
      legend([["Filled", "c-sealed", count(stored)], ["Reserved, not filled", "c-missed"]]),
      h("div", { class: "bars" }, row("Blocks of Quire", paged), row("Contiguous, request's limit", contiguous), row("Contiguous, model's limit", context)),
      h("p", { class: "note" }, "Percentages are reserved slots without a token, of those with one. Without paging, an engine reserves each sequence's greatest length at once. ", leased ? `Workers hold ${count(leased)} more slots, leased ahead of need.` : ""),
    );
  }

  showSlow(slowest) {
    const columns = [
      { name: "Request", cell: (each) => requestLink(each.request) },
      { name: "First token", number: true, cell: (each) => seconds(each.first_token_s) },
      { name: "Took", number: true, cell: (each) => seconds(each.total_s) },
      { name: "Cached", number: true, cell: (each) => percent(each.prompt_tokens ? each.cached_tokens / each.prompt_tokens : null) },
      { name: "Ended", cell: (each) => words(each.ended.toLowerCase()) },
    ];
    this.slowCard.hidden = !slowest.length;
    replace(this.slow, table(columns, slowest.slice(0, 6), ""));
  }

  recolour() {
    for (const each of Object.values(this.charts)) if (each.plot) each.draw();
  }

  close() {
    for (const each of Object.values(this.charts)) each.close();
  }
}
