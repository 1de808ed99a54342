// Elements. Text goes through text nodes alone, so nothing that a client sent becomes markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Puts new content in place; what had the focus keeps it if the new content has an element of the same data-key.
export function replace(place, ...children) {
  const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  place.replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (key !== undefined) [...place.querySelectorAll("[data-key]")].find((each) => each.dataset.key === key)?.focus();
}

export function card(title, attributes, ...children) {
  const { note, id, ...others } = attributes ?? {};
  const head = h("div", { class: "card-head" }, h("h2", {}, title), note ? h("p", { class: "note", id }, note) : null);
  return h("section", { ...others, class: `card ${others.class ?? ""}` }, head, ...children);
}

// A table; columns are {name, number, cell}. Figures stand on the right.
export function table(columns, rows, empty, more = {}) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const mark = (column) => (column.number ? "number" : column.class);
  const head = h("tr", {}, columns.map((each) => h("th", { scope: "col", class: mark(each) }, each.name)));
  const body = rows.map((row) => h("tr", more.row?.(row), columns.map((each) => h("td", { class: mark(each) }, each.cell(row)))));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

export const requestLink = (id, key) => h("a", { href: `#request/${encodeURIComponent(id)}`, class: "id", "data-key": key ?? `request-${id}` }, id);

export function legend(entries) {
  return h("ul", { class: "legend" }, entries.map(([name, mark, text]) => h("li", {}, h("i", { class: `swatch ${mark}` }), name, text ? h("b", {}, text) : null)));
}

// A bar of parts that share a whole: [{name, mark, value}].
export function stack(parts, whole, label) {
  const named = parts.filter((each) => each.value > 0);
  return h("div", { class: "stack", role: "img", "aria-label": label }, named.map((each) => h("i", { class: each.mark, title: each.title ?? each.name, style: { width: `${(100 * each.value) / (whole || 1)}%` } })));
}
