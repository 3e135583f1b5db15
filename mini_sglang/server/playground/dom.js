// Makes elements. Text is set as text, never as markup: a model's answer cannot become part of the page.

/** A new element with properties (`dataset` and `style` by name too) and children, which are nodes or strings. */
export function element(tag, properties = {}, ...children) {
  const { dataset = {}, ...others } = properties;
  const node = Object.assign(document.createElement(tag), others);
  Object.assign(node.dataset, dataset);
  node.append(...children);
  return node;
}

/** The element with this id, which the page has. */
export const byId = (id) => document.getElementById(id);
