// What was done to adapters, in words, and a way back for those that were unloaded.

import { el } from "./dom.js";
import { moment, version } from "./format.js";

const SHOWN = 50;

/** A change of one adapter, without its name. */
export function described(change) {
  return `${moment(change.time)}, ${change.by}: ${what(change)}`;
}

function what(change) {
  if (change.error) return `${change.change} failed: ${change.error}`;
  if (change.change === "unload") return `unloaded ${version(change.old_digest)}`;
  if (change.old_digest === change.new_digest) {
    return `loaded again, unchanged, from ${change.new_path}`;
  }
  return `loaded ${version(change.new_digest)} from ${change.new_path}`;
}

/**
 * The newest changes of all adapters.
 * @param {Object[]} changes  of /adapter_changes.
 * @param {Set<string>} loaded  the names that are served.
 * @param {function(string, string): void} loadAgain  takes a name and a path.
 */
export function changesList(changes, loaded, loadAgain) {
  const offered = new Set(loaded);
  return changes.slice(0, SHOWN).map((change) => {
    const item = el("li", {}, el("strong", {}, change.lora_name), ` ${described(change)} `);
    if (change.change === "unload" && !change.error && !offered.has(change.lora_name)) {
      const again = () => loadAgain(change.lora_name, change.old_path);
      const label = `Load ${change.lora_name} again`;
      const button = el("button", { class: "small", "aria-label": label, onclick: again }, "Load again");
      button.dataset.focus = `again ${change.lora_name}`;
      item.append(button);
    }
    offered.add(change.lora_name); // by the newest of its changes alone
    return item;
  });
}
