// One request: the verdict, its phases, a timeline across services with decisions as marks, and each decision.

import { load } from "../lib/data.js";
import { card, h, replace, requestLink, stack, svg } from "../lib/dom.js";
import { clock, count, percent, seconds, words } from "../lib/format.js";

const LANE = 26;
const LEFT = 136;
const WIDTH = 1180;

export class Request {
  constructor(id = "") {
    this.id = id;
    this.live = true;
    this.place = h("div", {}, h("div", { class: "page-head" }, h("h1", {}, "Request"), h("p", { class: "note" }, id)));
  }

  async refresh() {
    const found = await load("request", { id: this.id });
    this.live = !found.outcome;
    const diagnosis = found.diagnosis;
    const head = h("div", { class: "page-head" }, h("h1", { class: "id" }, found.request), h("p", { class: "note" }, this.about(found)));
    replace(this.place, head, this.verdict(diagnosis), this.phases(diagnosis), this.timeline(found), this.steps(diagnosis, found));
  }

  about(found) {
    const outcome = found.outcome;
    if (!outcome) return `since ${clock(found.began)}; it has not ended, or its end is not recorded`;
    const tenant = outcome.tenant ? `tenant ${outcome.tenant} · ` : "";
    return `${tenant}${outcome.worker || "no worker"} · ${clock(found.began)} · ${count(outcome.prompt_tokens)} prompt tokens, ${count(outcome.cached_tokens)} cached, ${count(outcome.output_tokens)} output · ${words(outcome.ended.toLowerCase())}`;
  }

  verdict(found) {
    const share = found.verdict.share ? percent(found.verdict.share) : null;
    return h(
      "section",
      { class: "card verdict" },
      h("div", { class: "verdict-share" }, h("b", {}, share ?? "?"), h("span", {}, "of the time in question")),
      h("div", {}, h("p", { class: "lead" }, found.verdict.sentence), found.prefix ? h("p", {}, found.prefix.sentence) : null, found.advised.map((each) => h("p", { class: "advice" }, h("b", {}, "What to do "), each.text, " ", h("a", { class: "note", href: each.link, target: "_blank", rel: "noopener" }, "Runbook")))),
    );
  }

  phases(found) {
    if (!found.phases.length) return null;
    const total = found.phases.reduce((sum, each) => sum + each.seconds, 0);
    let before = 0;
    const rows = found.phases.map((each) => [
      h("span", { class: "bar-name" }, each.label, each.after_first_token ? h("span", { class: "note" }, " after the first token") : null),
      stack([{ name: "", mark: "c-none", value: before }, { name: each.label, mark: markOfPhase(each), value: (before += each.seconds) && each.seconds }], total, `${each.label}: ${seconds(each.seconds)}`),
      h("b", {}, seconds(each.seconds)),
      h("span", { class: "note number" }, percent(each.share)),
    ]);
    const times = [["First token", seconds(found.first_token_s)], ["Whole", seconds(found.total_s)]].map(([name, value]) => `${name} ${value}`).join(" · ");
    return card("Where the time went", { note: times }, h("div", { class: "bars wide-names" }, rows));
  }

  // A lane of the verdict's phases and one of each service's spans below lanes of marks; times are from the first of them.
  timeline(found) {
    const spans = found.spans;
    const phases = found.timeline.map((each, at) => ({ ...each, name: each.label, mark: markOfPhase(found.diagnosis.phases[at]) }));
    const times = [...[...phases, ...spans].flatMap((each) => [each.start, each.end]), ...found.records.map((each) => each.at)];
    if (!times.length) return null;
    const begin = Math.min(...times);
    const length = Math.max(Math.max(...times) - begin, 1e-6);
    const x = (at) => LEFT + ((at - begin) / length) * (WIDTH - LEFT - 12);
    const services = [...new Set(spans.map((each) => each.service))];
    const lanes = services.flatMap((service) => rowsOf(spans.filter((each) => each.service === service)).map((row, at) => ({ name: at ? "" : service, spans: row })));
    if (phases.length) lanes.unshift({ name: "phases", spans: phases });
    const top = 30;
    const height = top + LANE * (lanes.length + 2) + 6;
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "timeline", role: "img", "aria-label": `timeline of ${found.request}` });
    for (const at of ticks(length)) {
      drawing.append(svg("line", { x1: x(begin + at), x2: x(begin + at), y1: top - 6, y2: height, class: "tick" }), svg("text", { x: x(begin + at), y: 14, class: "tick-name" }, at ? seconds(at) : "0"));
    }
    const marks = [["router", "router"], ["kvmanager", "KV manager"]];
    marks.forEach(([service, name], lane) => {
      const y = top + LANE * lane + LANE / 2;
      drawing.append(svg("text", { x: 0, y: y + 4, class: "lane-name" }, `${name} decides`));
      for (const each of found.records.filter((record) => record.service === service)) {
        const words_ = `${each.kind} at ${seconds(each.at - begin)}: ${[each.chosen, ...each.reasons].filter(Boolean).join(", ")}`;
        drawing.append(svg("path", { d: `M${x(each.at)} ${y - 6} l6 6 l-6 6 l-6 -6z`, class: `mark k-${each.kind}` }, svg("title", {}, words_)));
      }
    });
    lanes.forEach((lane, index) => {
      const y = top + LANE * (index + 2);
      if (lane.name) drawing.append(svg("text", { x: 0, y: y + 17, class: "lane-name" }, titleOf(lane.name)), svg("line", { x1: 0, x2: WIDTH, y1: y, y2: y, class: "lane-line" }));
      for (const each of lane.spans) {
        const width = Math.max(2, x(each.end) - x(each.start));
        const bar = svg("rect", { x: x(each.start), y: y + 4, width, height: LANE - 8, rx: 3, class: `span ${each.mark ?? markOf(each.service)}` }, svg("title", {}, `${each.name}: ${seconds(each.end - each.start)}, from ${seconds(each.start - begin)}`));
        drawing.append(bar);
        if (width > 7 * each.name.length + 10) drawing.append(svg("text", { x: x(each.start) + 6, y: y + 17, class: "span-name" }, each.name));
      }
    });
    const note = spans.length ? `${count(spans.length)} spans, ${count(found.records.length)} decisions` : "no span: its trace was not sampled, or newer spans took its place";
    return card("Timeline", { note }, h("div", { class: "scroll" }, drawing));
  }

  steps(diagnosis, found) {
    const others = new Set(found.records.flatMap((each) => [each.victim, each.beneficiary]).filter((each) => each && each !== found.request));
    return card(
      "Decisions",
      {},
      h("ol", { class: "steps" }, diagnosis.steps.map((each) => h("li", {}, h("b", {}, each.offset ? seconds(each.offset) : "0"), h("span", { class: "note" }, each.service === "router" ? "router" : "KV manager"), h("span", {}, each.sentence)))),
      diagnosis.missing.map((each) => h("p", { class: "note" }, `Not known: ${each}`)),
      others.size ? h("p", {}, h("span", { class: "note" }, "Requests that took or gave blocks: "), [...others].slice(0, 12).map((each) => [requestLink(each), " "])) : null,
    );
  }
}

function markOfPhase(phase) {
  return phase.cause === "not_known" ? "c-unknown" : phase.is_work ? "c-sealed" : "c-wait";
}

// Puts spans that overlap into rows of their own.
function rowsOf(spans) {
  const rows = [];
  for (const each of [...spans].sort((one, other) => one.start - other.start || other.end - one.end)) {
    const row = rows.find((found) => found[found.length - 1].end <= each.start);
    if (row) row.push(each);
    else rows.push([each]);
  }
  return rows;
}

function ticks(length) {
  const rough = length / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  return Array.from({ length: Math.floor(length / step) + 1 }, (_, at) => at * step);
}

function titleOf(service) {
  const name = service.replace(/^quire-/, "");
  return { kvmanager: "KV manager", gpuworker: "worker" }[name] ?? name;
}

function markOf(service) {
  if (service.endsWith("router")) return "s-router";
  return service.endsWith("kvmanager") ? "s-manager" : "s-worker";
}
