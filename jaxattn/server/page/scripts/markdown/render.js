// Shows Markdown as DOM nodes, and while a text grows renews only the blocks that changed.

import { copyButton } from "../view/icons.js";
import { element } from "../view/element.js";
import { parseBlocks } from "./blocks.js";
import { highlight } from "./highlight.js";
import { parseInline } from "./inline.js";

/** The text of an answer inside `place`. */
export class MarkdownView {
  constructor(place) {
    this.place = place;
    this.sources = [];
  }

  /** Shows a text; its blocks that were shown before stay as they are. */
  update(text) {
    const blocks = parseBlocks(text);
    let same = 0;
    while (same < blocks.length && this.sources[same] === blocks[same].source) same += 1;
    while (this.place.childNodes.length > same) this.place.lastChild.remove();
    this.place.append(...blocks.slice(same).map(block));
    this.sources = blocks.map((each) => each.source);
  }
}

const BLOCKS = {
  heading: ({ level, text }) => element(`h${Math.min(level + 2, 6)}`, { class: `level-${level}` }, ...inline(text)),
  paragraph: ({ text }) => element("p", {}, ...inline(text)),
  rule: () => element("hr"),
  quote: ({ blocks }) => element("blockquote", {}, ...blocks.map(block)),
  math: ({ text }) => element("div", { class: "math", role: "math", text }),
  code: ({ language, text }) => codeBlock(text, language),
  table: tableBlock,
  list: listBlock,
};

const block = (found) => BLOCKS[found.type](found);

/** Code under a bar with its language and a copy button. */
export function codeBlock(text, language = "") {
  const code = element("code", {}, ...highlight(text, language).map(({ kind, text: piece }) =>
    kind ? element("span", { class: `code-${kind}`, text: piece }) : piece));
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", { text: language || "text" }), copyButton("Copy code", () => text)),
    element("pre", { tabindex: "0" }, code),
  );
}

function tableBlock({ head, align, rows }) {
  const cell = (tag) => (text, column) => element(tag, { class: `align-${align[column]}` }, ...inline(text));
  return element(
    "div",
    { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...head.map(cell("th")))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell("td"))))),
    ),
  );
}

function listBlock({ ordered, start, loose, items }) {
  const entry = ({ checked, blocks }) => {
    const inner = blocks.flatMap((each) =>
      !loose && each.type === "paragraph" ? inline(each.text) : [block(each)]);
    const box = checked === null ? null : element("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "not done" });
    return element("li", { class: checked === null ? null : "task" }, box, ...inner);
  };
  return element(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null }, ...items.map(entry));
}

const INLINE = {
  text: ({ text }) => text,
  code: ({ text }) => element("code", { text }),
  math: ({ text }) => element("span", { class: "math", role: "math", text }),
  break: () => element("br"),
  strong: ({ children }) => element("strong", {}, ...children.map(node)),
  emphasis: ({ children }) => element("em", {}, ...children.map(node)),
  deleted: ({ children }) => element("del", {}, ...children.map(node)),
  link: ({ address, children }) => {
    const inner = children.map(node);
    if (address === null) return element("span", {}, ...inner);
    return element("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...inner);
  },
};

const node = (found) => INLINE[found.type](found);
const inline = (text) => parseInline(text).map(node);
