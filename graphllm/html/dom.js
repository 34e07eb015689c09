"use strict";

/** Set attributes and children of an element; `on...` are listeners, `--...` custom properties. */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  // One by one: a call has a limited number of arguments.
  for (const child of children.flat(Infinity)) if (child ?? false) element.append(child);
  return element;
}

const h = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
