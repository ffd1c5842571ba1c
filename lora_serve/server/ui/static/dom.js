// Makes and changes elements. Text goes in as text: nothing on this page parses markup.

/**
 * An element.
 * @param {string} tag
 * @param {Object} props  attributes; those of functions are listeners ("onclick"), true means that
 *     an attribute is there, and null, undefined and false that it is not.
 * @param {...(Node|string|null)} children
 */
export function el(tag, props = {}, ...children) {
  return furnished(document.createElement(tag), props, children);
}

/** The same in SVG. */
export function svg(tag, props = {}, ...children) {
  return furnished(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function furnished(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Set a text only if it is another one, so that screen readers say it once. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Draw a part anew; the button that has the focus is known again by its `data-focus`. */
export function keepingFocus(part, draw) {
  const focused = part.contains(document.activeElement) && document.activeElement.dataset.focus;
  draw(part);
  if (!focused) return;
  [...part.querySelectorAll("button")].find((each) => each.dataset.focus === focused)?.focus();
}

const TOLD_MS = 8000;
let telling = null;

/** Say for a while, to eyes and screen readers, that something was done. */
export function tell(text) {
  clearTimeout(telling);
  say(byId("status"), text);
  telling = setTimeout(() => say(byId("status"), ""), TOLD_MS);
}

/**
 * Run `work` while the button is disabled; what goes wrong is shown in `error`.
 * @returns {Promise<boolean>} whether it was done.
 */
export async function whileBusy(button, error, work) {
  button.disabled = true;
  say(error, "");
  try {
    await work();
    return true;
  } catch (failure) {
    say(error, failure.message);
    return false;
  } finally {
    button.disabled = false;
  }
}

/** Ask before something is destroyed. @returns {Promise<boolean>} whether it may be. */
export function confirmed(title, text, label) {
  return new Promise((resolve) => {
    const dialog = el(
      "dialog",
      { class: "confirm", "aria-labelledby": "confirm-title" },
      el(
        "form",
        { method: "dialog" },
        el("h2", { id: "confirm-title" }, title),
        el("p", {}, text),
        el(
          "div",
          { class: "buttons" },
          el("button", { value: "cancel", autofocus: true }, "Cancel"),
          el("button", { value: "yes", class: "danger" }, label),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
