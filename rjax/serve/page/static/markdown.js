// Markdown as elements. Text becomes text nodes, and HTML in it stays text.

import { Lexer } from "./marked.js";

const OPTIONS = { gfm: true, breaks: true };
const INLINE = { strong: "strong", em: "em", del: "del" };

/**
 * The elements of a Markdown text.
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function markdown(text) {
  const made = document.createDocumentFragment();
  addBlocks(made, new Lexer(OPTIONS).lex(text));
  return made;
}

function addBlocks(parent, tokens) {
  for (const token of tokens) addBlock(parent, token);
}

function addBlock(parent, token) {
  switch (token.type) {
    case "space":
      return;
    case "heading":
      addInline(add(parent, `h${Math.min(6, token.depth + 3)}`), token.tokens);
      return;
    case "paragraph":
      addInline(add(parent, "p"), token.tokens);
      return;
    case "code":
      add(add(parent, "pre"), "code").textContent = token.text;
      return;
    case "blockquote":
      addBlocks(add(parent, "blockquote"), token.tokens);
      return;
    case "list":
      addList(parent, token);
      return;
    case "table":
      addTable(parent, token);
      return;
    case "hr":
      add(parent, "hr");
      return;
    case "text": // of a list's item
      addInline(parent, token.tokens ?? [token]);
      return;
    default: // HTML and the like
      add(parent, "p").textContent = token.raw;
  }
}

function addList(parent, token) {
  const list = add(parent, token.ordered ? "ol" : "ul");
  if (token.ordered && token.start !== 1) list.start = token.start;
  for (const item of token.items) {
    const made = add(list, "li");
    if (item.task) made.append(item.checked ? "☑ " : "☐ ");
    addBlocks(made, item.tokens);
  }
}

function addTable(parent, token) {
  const table = add(parent, "table");
  const head = add(add(table, "thead"), "tr");
  for (const cell of token.header) addInline(add(head, "th"), cell.tokens);
  const body = add(table, "tbody");
  for (const cells of token.rows) {
    const row = add(body, "tr");
    for (const cell of cells) addInline(add(row, "td"), cell.tokens);
  }
}

function addInline(parent, tokens) {
  for (const token of tokens) {
    if (token.type in INLINE) addInline(add(parent, INLINE[token.type]), token.tokens);
    else if (token.type === "codespan") add(parent, "code").textContent = token.text;
    else if (token.type === "br") add(parent, "br");
    else if (token.type === "link" && /^https?:/i.test(token.href)) addLink(parent, token);
    else if (token.type === "text" && token.tokens) addInline(parent, token.tokens);
    else if (token.type === "text" || token.type === "escape") parent.append(token.text);
    else parent.append(token.raw);
  }
}

function addLink(parent, token) {
  const link = add(parent, "a");
  link.href = token.href;
  link.rel = "noopener noreferrer";
  link.target = "_blank";
  addInline(link, token.tokens);
}

function add(parent, tag) {
  const made = document.createElement(tag);
  parent.append(made);
  return made;
}
