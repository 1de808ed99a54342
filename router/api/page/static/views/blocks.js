// The block map of a worker: one cell a block. A chosen sequence shows its block table, logical to physical.
// Where layers are in groups, a cell is a page, and its shape says of which group the page's block is.

import { load } from "../lib/data.js";
import { card, h, legend, replace, requestLink, svg, table } from "../lib/dom.js";
import { count, figure, percent, title, words } from "../lib/format.js";

// By number, as BlockUse in kvmanager.proto has them.
const USES = [null, ["Free", "c-free"], ["Leased ahead", "c-leased"], ["Filling", "c-filling"], ["Pending", "c-pending"], ["Sealed", "c-sealed"], ["Shared", "c-shared"], ["Cached", "c-cached"]];
// Shapes of cells by number of the group, square first: corners from the middle, in halves of a side; null is a circle.
const SHAPES = [[[-1, -1], [1, -1], [1, 1], [-1, 1]], null, [[0, -1], [1, 1], [-1, 1]], [[0, -1], [1, 0], [0, 1], [-1, 0]], [[-1, -1], [1, -1], [0, 1]], [[-1, -0.4], [1, -0.4], [1, 0.4], [-1, 0.4]]];
const NO_GROUP = 255;
// Cells of a map: shapes need more room than colours.
const [LIMIT, SHAPED_LIMIT] = [16384, 4096];
const WAIT_MS = 120;

const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
const shape = (group) => group % SHAPES.length;

// The side of a cell, so that the map is about as high as a screen has room for.
const cellOf = (blocks, room) => Math.max(5, Math.min(24, Math.floor(Math.sqrt((room * 330) / blocks))));

export class Blocks {
  constructor(worker = "", sequence = "") {
    this.worker = worker;
    this.sequence = sequence;
    this.first = 0;
    this.at = null;
    this.beside = [];
    this.found = null;
    this.canvas = h("canvas", { class: "map", tabindex: 0, role: "application", "aria-label": "block map; arrow keys move from cell to cell", onmousemove: (event) => this.hover(event), onkeydown: (event) => this.key(event) });
    this.legend = h("div");
    this.detail = h("div", { class: "detail", "aria-live": "polite" });
    this.list = h("div");
    this.paging = h("div");
    this.choose = h("select", { id: "worker", onchange: () => { location.hash = `blocks/${encodeURIComponent(this.choose.value)}`; } });
    this.pages = h("div", { class: "pages" });
    this.note = h("p", { class: "note" });
    this.cells = h("span");
    this.most = h("span");
    this.place = h(
      "div",
      {},
      h("div", { class: "page-head" }, h("h1", {}, "Blocks"), this.note, h("span", { class: "grow" }), h("label", { class: "inline" }, "Worker", this.choose)),
      this.legend,
      h("div", { class: "grid map-grid" }, h("div", { class: "column" }, card("Pool", { note: this.cells }, this.canvas, this.pages), this.paging), h("div", { class: "column" }, card("Block", {}, this.detail), card("Sequences", { note: this.most }, this.list))),
    );
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.canvas.parentElement);
    this.showDetail(null);
  }

  async refresh() {
    const { workers, pages, groups } = await load("overview");
    this.paged = pages;
    this.groups = groups;
    this.pool = workers.find((each) => each.worker === (this.worker || workers[0]?.worker));
    const names = workers.map((each) => each.worker);
    if (!this.worker) this.worker = names[0] ?? "";
    if (!this.worker) throw new Error("no worker is known");
    replace(this.choose, names.map((each) => h("option", { value: each, selected: each === this.worker }, each)));
    this.found = await load("blocks", { worker: this.worker, first: this.first, limit: this.limit(), sequence: this.sequence });
    this.uses = bytes(this.found.uses);
    this.groupOf = bytes(this.found.groups);
    this.table = this.found.table;
    this.show();
    await this.detailOf(this.at);
  }

  show() {
    const found = this.found;
    const units = this.paged ? "pages" : `blocks of ${count(found.block_size)} slots`;
    this.note.textContent = `${count(found.num_blocks)} ${units}, ${count(this.pool?.in_use)} in use by ${count(found.num_sequences)} live sequences${this.paged ? `. ${this.paged}` : ""}`;
    this.cells.textContent = `one cell a ${this.unit()}; point at one, or use the arrow keys`;
    this.most.textContent = `those with the most ${this.unit()}s`;
    replace(this.legend, legend(this.counts().map((each, at) => [...USES[at + 1], each])), this.groups.length ? legend(this.groupCounts()) : null);
    this.showPages();
    this.showSequences();
    this.showTable();
    this.draw();
  }

  // How many blocks of the whole pool have each use. Of a pool with several pages the blocks in use are counted as one.
  counts() {
    if (this.found.num_blocks <= this.limit()) return USES.slice(1).map((_, at) => count(this.uses.reduce((sum, use) => sum + (use === at + 1), 0)));
    const { free, leased, cached } = this.pool ?? {};
    return [count(free), count(leased), null, null, null, null, count(cached)];
  }

  limit() {
    return this.paged ? SHAPED_LIMIT : LIMIT;
  }

  unit() {
    return this.paged ? "page" : "block";
  }

  // Of each group its shape, its name, and its blocks in the whole pool.
  groupCounts() {
    return this.groups.map(({ name, pages }, at) => {
      const { in_use: used, cached } = this.pool?.groups[at] ?? {};
      const held = used === undefined ? "" : `, ${count(used)} blocks in use, ${count(cached)} cached`;
      return [title(name), `g-${shape(at)}`, `${count(pages)} ${pages === 1 ? "page" : "pages"} a block${held}`];
    });
  }

  showPages() {
    const total = Math.ceil(this.found.num_blocks / this.limit());
    const page = (name, first, off) => h("button", { type: "button", disabled: off, "data-key": name, onclick: () => { this.first = first; this.refresh(); } }, name);
    replace(this.pages, total < 2 ? null : [page("Earlier", this.first - this.limit(), this.first === 0), h("span", { class: "note" }, `from ${this.unit()} ${count(this.first)}`), page("Later", this.first + this.limit(), this.first + this.limit() >= this.found.num_blocks)]);
  }

  showSequences() {
    const columns = [
      { name: "Request", cell: (each) => h("button", { type: "button", class: "pick id", "data-key": `s-${each.sequence}`, "aria-pressed": String(each.sequence === this.table?.sequence), onclick: () => this.pick(each.sequence) }, each.request || `sequence ${each.sequence}`) },
      { name: "Phase", cell: (each) => words(each.phase) },
      { name: this.paged ? "Pages" : "Blocks", number: true, cell: (each) => count(each.blocks) },
      { name: "Shared", number: true, cell: (each) => count(each.shared) },
      { name: "At most", number: true, cell: (each) => count(each.max_blocks) },
    ];
    replace(this.list, table(columns, this.found.sequences.slice(0, 12), "No sequence holds blocks now."));
  }

  async pick(sequence) {
    this.sequence = sequence;
    await this.refresh();
  }

  // The classic picture: a row of logical blocks above, the pool below, and a line from each to its place.
  showTable() {
    if (!this.table?.blocks.length) {
      replace(this.paging);
      return;
    }
    const { blocks, shared, request } = this.table;
    const shown = blocks.slice(0, 64);
    const width = 860;
    const cell = Math.min(40, (width - 2) / shown.length);
    const left = (width - cell * shown.length) / 2;
    const pool = (block) => 1 + ((block + 0.5) / this.found.num_blocks) * (width - 2);
    const drawing = svg("svg", { viewBox: `0 0 ${width} 190`, class: "paging", role: "img", "aria-label": `block table of ${request}: ${blocks.join(", ")}` });
    drawing.append(svg("rect", { x: 1, y: 150, width: width - 2, height: 20, rx: 4, class: "strip" }));
    const step = width / Math.min(this.uses.length, width);
    if (!this.first) for (let at = 0; at < this.uses.length; at += Math.max(1, Math.floor(this.uses.length / width))) if (this.uses[at] > 1) drawing.append(svg("rect", { x: pool(at) - 0.5, y: 150, width: Math.max(0.8, step), height: 20, class: `strip-block ${USES[this.uses[at]][1]}` }));
    shown.forEach((block, logical) => {
      const x = left + cell * (logical + 0.5);
      const mark = block < 0 ? "c-free" : logical < shared ? "c-shared" : (USES[this.uses[block - this.first]]?.[1] ?? "c-sealed");
      if (block >= 0) drawing.append(svg("path", { d: `M${x} 52 C${x} 105 ${pool(block)} 95 ${pool(block)} 149`, class: `wire ${mark}` }));
      drawing.append(svg("rect", { x: x - cell / 2 + 1, y: 22, width: cell - 2, height: 30, rx: 4, class: `logical ${mark}` }, svg("title", {}, `logical ${logical} -> ${block < 0 ? "released" : `physical ${block}`}`)));
      if (cell >= 26) drawing.append(svg("text", { x, y: 41, class: "logical-name" }, block < 0 ? "–" : String(block)), svg("text", { x, y: 14, class: "tick-name middle" }, String(logical)));
    });
    const unit = this.unit();
    const ofPool = this.paged ? "pages of the pool; a block is at its first page" : "physical blocks of the pool";
    drawing.append(svg("text", { x: 1, y: 186, class: "tick-name" }, `${unit} 0`), svg("text", { x: width / 2, y: 186, class: "tick-name middle" }, ofPool), svg("text", { x: width - 1, y: 186, class: "tick-name end" }, `${unit} ${count(this.found.num_blocks - 1)}`));
    const group = this.groups.length ? ` of group ${this.groups[0].name}` : "";
    const title = h("div", { class: "card-head" }, h("h2", {}, "Block table"), h("p", { class: "note" }, requestLink(request || this.table.sequence), ` · ${count(blocks.length)} logical blocks${group}, ${count(shared)} shared at admission`));
    replace(this.paging, h("section", { class: "card" }, title, h("div", { class: "scroll" }, drawing)));
  }

  draw() {
    if (!this.uses) return;
    const style = getComputedStyle(document.documentElement);
    const surface = style.getPropertyValue("--surface").trim();
    const colours = USES.map((each) => each && style.getPropertyValue(`--${each[1]}`).trim());
    const room = this.canvas.parentElement.clientWidth - 42;
    const size = cellOf(this.uses.length, room);
    this.columns = Math.max(8, Math.floor(room / size));
    this.size = size;
    const rows = Math.ceil(this.uses.length / this.columns);
    const ratio = devicePixelRatio || 1;
    const [width, height] = [this.columns * size, rows * size];
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const chosen = new Set(this.table?.blocks ?? []);
    const gap = size > 8 ? 2 : 1;
    const side = size - gap;
    this.uses.forEach((use, at) => {
      const [x, y] = [(at % this.columns) * size, Math.floor(at / this.columns) * size];
      const marked = chosen.has(at + this.first);
      pen.globalAlpha = chosen.size && use > 2 && !marked ? 0.62 : 1;
      pen.fillStyle = colours[use] ?? colours[1];
      pen.beginPath();
      const group = this.groupOf[at] ?? NO_GROUP;
      if (group === NO_GROUP || !shape(group)) pen.roundRect(x, y, side, side, size > 8 ? 3 : 1);
      else if (!SHAPES[shape(group)]) pen.arc(x + side / 2, y + side / 2, side / 2, 0, 2 * Math.PI);
      else for (const [right, down] of SHAPES[shape(group)]) pen.lineTo(x + ((1 + right) * side) / 2, y + ((1 + down) * side) / 2);
      pen.fill();
      if (!marked) return;
      pen.fillStyle = surface;
      pen.beginPath();
      pen.arc(x + side / 2, y + side / 2, Math.max(1, size / 7), 0, 2 * Math.PI);
      pen.fill();
    });
    pen.globalAlpha = 1;
    pen.strokeStyle = style.getPropertyValue("--ink").trim();
    // The cell that is looked at, and more finely the other pages of its block.
    for (const at of new Set([...this.beside, ...(this.at === null ? [] : [this.at])])) {
      pen.lineWidth = at === this.at ? 2 : 1;
      pen.strokeRect((at % this.columns) * size, Math.floor(at / this.columns) * size, side, side);
    }
  }

  hover(event) {
    const column = Math.floor(event.offsetX / this.size);
    const at = Math.floor(event.offsetY / this.size) * this.columns + column;
    if (column < this.columns && at < (this.uses?.length ?? 0)) this.look(at);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (!step || !this.uses) return;
    event.preventDefault();
    this.look(Math.max(0, Math.min(this.uses.length - 1, (this.at ?? -step) + step)));
  }

  look(at) {
    if (at === this.at) return;
    this.at = at;
    this.beside = [];
    this.draw();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.detailOf(at), WAIT_MS);
  }

  async detailOf(at) {
    if (at === null) return;
    try {
      const found = await load("block", { worker: this.worker, block: at + this.first });
      if (this.at !== at) return;
      this.beside = found.pages.map((page) => page - this.first).filter((each) => each >= 0 && each < this.uses.length);
      if (this.groups.length) this.draw();
      this.showDetail(found);
    } catch (error) {
      replace(this.detail, h("p", { class: "empty" }, error.message));
    }
  }

  showDetail(found) {
    if (!found) {
      replace(this.detail, h("p", { class: "empty" }, "Point at a block to see who holds it."));
      return;
    }
    const [name, mark] = USES[found.use];
    const known = found.figures.released_since;
    const group = found.use > 2 ? this.groups[found.group] : undefined;
    const pairs = [
      ...(group ? [["Group of layers", [h("i", { class: `swatch g-${shape(found.group)}` }), ` ${group.name}, ${count(group.layers)} ${group.layers === 1 ? "layer" : "layers"}`]], ["Pages", found.pages.map(count).join(", ")]] : []),
      ["References", count(found.references)],
      ["Place in the block table", found.references || found.hash ? count(found.index) : "–"],
      ["Last use", found.use === 7 && known !== undefined ? `${count(known)} blocks released since` : found.references ? "in use" : "–"],
      ...Object.entries(found.figures).filter(([each]) => each !== "released_since").map(([each, value]) => [title(words(each)), figure(value)]),
      ["Hash", found.hash ? h("code", {}, found.hash) : "–"],
    ];
    const holders = found.holders.map((each) => h("li", {}, requestLink(each.request || each.sequence, `h-${each.sequence}`), each.tenant ? h("span", { class: "note" }, ` tenant ${each.tenant}`) : null, h("span", { class: "note" }, ` ${words(each.phase)}, ${percent(each.blocks / each.max_blocks)} of its greatest length`)));
    replace(
      this.detail,
      h("p", { class: "block-name" }, h("i", { class: `swatch ${mark}` }), h("b", {}, `${this.paged && !group ? "Page" : "Block"} ${count(found.block)}`), h("span", { class: "note" }, group && found.block !== this.at + this.first ? `${name}; page ${count(this.at + this.first)} is a part of it` : name)),
      h("dl", { class: "pairs" }, pairs.map(([each, value]) => h("div", {}, h("dt", {}, each), h("dd", {}, value)))),
      holders.length ? [h("p", { class: "note" }, "Held by"), h("ul", { class: "holders" }, holders)] : null,
    );
  }

  recolour() {
    this.draw();
  }

  close() {
    this.watch.disconnect();
    clearTimeout(this.timer);
  }
}
