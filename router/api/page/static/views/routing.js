// Each routing decision: what each worker would have cost, and the first token, predicted and then measured.

import { load } from "../lib/data.js";
import { card, h, legend, replace, requestLink, stack, svg } from "../lib/dom.js";
import { clock, count, seconds, words } from "../lib/format.js";

const TERMS = [
  ["queue_delay", "Queue", "c-wait"],
  ["fetch", "Fetch", "c-shared"],
  ["prefill", "Prefill", "c-sealed"],
  ["decode_pressure", "Output", "c-leased"],
  ["unseen", "Other router's home", "c-pending"],
];
const SIDE = 300;
const EDGE = 62;
const MARGIN = 18;
// So many requests with a first token are enough to leave out those without.
const ENOUGH = 6;

export class Routing {
  constructor() {
    this.list = h("div", { class: "choices" });
    this.plot = h("div");
    this.place = h(
      "div",
      {},
      h("div", { class: "page-head" }, h("h1", {}, "Routing"), h("p", { class: "note" }, "newest first; a bar is the predicted cost of a worker, and the shortest one gets the request")),
      h("div", { class: "grid wide-left" }, card("Decisions", {}, legend(TERMS.map(([, name, mark]) => [name, mark])), this.list), h("div", {}, card("First token: predicted, measured", {}, this.plot))),
    );
  }

  async refresh() {
    const { decisions } = await load("routing", { limit: 120 });
    const measured = decisions.filter((each) => each.predicted_s > 0 && each.actual_s > 0);
    const listed = measured.length >= ENOUGH ? measured : decisions;
    this.showPlot(measured);
    replace(this.list, listed.length ? listed.slice(0, 20).map(choice) : h("p", { class: "empty" }, "No request was routed yet."));
  }

  showPlot(points) {
    if (!points.length) {
      replace(this.plot, h("p", { class: "empty" }, "No request with a first token yet."));
      return;
    }
    const all = points.flatMap((each) => [each.predicted_s, each.actual_s]);
    const low = Math.floor(Math.log10(Math.min(...all)) * 2) / 2;
    const high = Math.max(Math.ceil(Math.log10(Math.max(...all)) * 2) / 2, low + 1);
    const at = (value) => EDGE + ((Math.log10(value) - low) / (high - low)) * (SIDE - EDGE - MARGIN);
    const drawing = svg("svg", { viewBox: `0 0 ${SIDE} ${SIDE - 18}`, class: "scatter", role: "img", "aria-label": "predicted against measured seconds to the first token" });
    for (let power = Math.ceil(low); power <= high; power += 1) {
      const value = 10 ** power;
      drawing.append(
        svg("line", { x1: at(value), x2: at(value), y1: MARGIN, y2: SIDE - EDGE, class: "tick" }),
        svg("line", { x1: EDGE, x2: SIDE - MARGIN, y1: SIDE - at(value), y2: SIDE - at(value), class: "tick" }),
        svg("text", { x: at(value), y: SIDE - EDGE + 16, class: "tick-name middle" }, seconds(value)),
        svg("text", { x: EDGE - 6, y: SIDE - at(value) + 4, class: "tick-name end" }, seconds(value)),
      );
    }
    drawing.append(
      svg("line", { x1: at(10 ** low), y1: SIDE - at(10 ** low), x2: at(10 ** high), y2: SIDE - at(10 ** high), class: "even" }),
      svg("text", { x: (SIDE + EDGE) / 2, y: SIDE - EDGE + 38, class: "tick-name middle" }, "predicted"),
      svg("text", { x: 10, y: (SIDE - EDGE) / 2, class: "tick-name middle", transform: `rotate(-90 10 ${(SIDE - EDGE) / 2})` }, "measured"),
    );
    for (const each of points) drawing.append(svg("circle", { cx: at(each.predicted_s), cy: SIDE - at(each.actual_s), r: 3.5, class: "dot" }, svg("title", {}, `${each.request}: predicted ${seconds(each.predicted_s)}, measured ${seconds(each.actual_s)}`)));
    const ratios = points.map((each) => each.actual_s / each.predicted_s).sort((one, other) => one - other);
    const median = ratios[Math.floor(ratios.length / 2)];
    replace(this.plot, drawing, h("p", { class: "note" }, `${count(points.length)} requests; half took more than ${median.toFixed(2)} times the predicted time. On the line, both are equal.`));
  }
}

function choice(decision) {
  const priced = decision.candidates.filter((each) => each.cost !== null);
  const most = Math.max(...priced.map((each) => each.cost), 1e-9);
  const rows = decision.candidates.map((each) => {
    const chosen = each.name === decision.worker;
    const parts = TERMS.map(([term, name, mark]) => ({ name, mark, value: each.terms[term] ?? 0, title: `${name}: ${seconds(each.terms[term] ?? 0)}` }));
    const hits = each.figures.hit_blocks ? `${count(each.figures.hit_blocks)} hit block${each.figures.hit_blocks === 1 ? "" : "s"}` : "";
    return [
      h("span", { class: chosen ? "bar-name chosen" : "bar-name" }, each.name),
      each.cost === null ? h("span", { class: "note" }, each.rejected) : stack(parts, most, parts.map((part) => part.title).join(", ")),
      h("b", {}, each.cost === null ? "out" : seconds(each.cost)),
      h("span", { class: "note" }, hits),
    ];
  });
  const measured = decision.actual_s === null ? "not measured yet" : `measured ${seconds(decision.actual_s)}`;
  const times = decision.predicted_s === null ? words(decision.chosen) : `predicted ${seconds(decision.predicted_s)} · ${measured}`;
  return h(
    "article",
    { class: "choice" },
    h("div", { class: "choice-head" }, h("span", { class: "time" }, clock(decision.at)), requestLink(decision.request, `r-${decision.id}`), h("span", { class: "note" }, `${count(decision.figures.prompt_tokens ?? 0)} prompt tokens`), h("span", { class: "grow" }), h("span", { class: "note" }, times)),
    h("div", { class: "bars" }, rows),
  );
}
