// Builds DOM nodes. Text becomes text nodes only, so no text of a model turns into markup.

export const byId = (id) => document.getElementById(id);

/**
 * An element with attributes and children. `class` and `text` are shorthands; a function is a
 * listener, as in {onclick: f}; null, undefined and false are left out.
 */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with attributes and children. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

const STATUS_CLEAR_MS = 4000;
let clearing = 0;

/** Tells a screen reader, without moving the focus. */
export function announce(text) {
  const place = byId("announcer");
  place.textContent = text;
  clearTimeout(clearing);
  clearing = setTimeout(() => { place.textContent = ""; }, STATUS_CLEAR_MS);
}

/** 1234567 as "1,234,567". */
export const counted = (number) => Math.round(number).toLocaleString("en-US");

/** Tokens per second, with a decimal where they are few. */
export const rated = (rate) => (rate < 100 ? rate.toFixed(1) : counted(rate));

/** Bytes in the unit that suits them. */
export function sized(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}
