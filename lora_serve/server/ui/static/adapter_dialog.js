// One adapter: what it is, what was done to it, and for admins what can be done.

import { ask, askJson } from "./api.js";
import { described } from "./changes.js";
import { byId, confirmed, el, say, tell, whileBusy } from "./dom.js";
import { bytes, moment, version, whole } from "./format.js";
import { session } from "./session.js";

export class AdapterDialog {
  /** @param {function(): Promise<void>} changed  called after each change. */
  constructor(changed) {
    this.changed = changed;
    this.row = null;
    this.changes = [];
    const submit = (id, work) =>
      byId(id).addEventListener("submit", (event) => {
        event.preventDefault();
        this.#run(event.submitter, work);
      });
    submit("replace-form", () => this.#load(this.row.name, byId("replace-path").value, true));
    submit("rollback-form", () => this.#rollBack());
    submit("load-form", () => this.#loadNew());
    byId("reset-one").addEventListener("click", (event) => this.#resetOne(event.currentTarget));
    byId("unload").addEventListener("click", (event) => this.#unload(event.currentTarget));
    for (const button of document.querySelectorAll("dialog .close")) {
      button.addEventListener("click", () => button.closest("dialog").close());
    }
  }

  openForLoad(name = "", path = "") {
    byId("load-name").value = name;
    byId("load-path").value = path;
    say(byId("load-error"), "");
    byId("load-dialog").showModal();
  }

  async open(row) {
    this.row = row;
    this.changes = [];
    byId("replace-path").value = "";
    say(byId("adapter-error"), "");
    byId("adapter-changes").hidden = true;
    byId("adapter-actions").hidden = !session.mayChange;
    this.#show();
    byId("adapter-dialog").showModal();
    await this.#readChanges();
  }

  close() {
    byId("adapter-dialog").close();
    byId("load-dialog").close();
  }

  /** Take over what the list says now of the adapter that is shown. */
  update(rows) {
    const row = rows.find((each) => each.name === this.row?.name);
    if (!row || !byId("adapter-dialog").open) return;
    this.row = row;
    this.#show();
  }

  async resetEverything() {
    const text = "All cached KV is forgotten, of all adapters and of the model. The next requests compute it anew.";
    if (!(await confirmed("Reset the prefix cache?", text, "Reset"))) return;
    await whileBusy(byId("reset-all"), byId("adapters-error"), async () => {
      await reset();
      tell("The prefix cache was reset.");
    });
  }

  #show() {
    const { row } = this;
    say(byId("adapter-title"), row.name);
    const facts = {
      Digest: row.digest,
      Generation: whole(row.generation),
      Rank: whole(row.rank),
      Size: bytes(row.bytes),
      Loaded: moment(row.created),
      Source: row.source,
    };
    byId("adapter-facts").replaceChildren(
      ...Object.entries(facts).map(([name, text]) =>
        el("div", {}, el("dt", {}, name), el("dd", {}, text ?? "–")),
      ),
    );
    this.#showVersions();
  }

  async #readChanges() {
    if (!session.mayChange) return;
    const { data } = await askJson("adapter_changes");
    this.changes = data.filter((change) => change.lora_name === this.row.name);
    byId("adapter-changes").hidden = !this.changes.length;
    byId("adapter-changes-list").replaceChildren(
      ...this.changes.map((change) => el("li", {}, described(change))),
    );
    this.#showVersions();
  }

  /** Offer the versions that stood under the name before, newest first. */
  #showVersions() {
    const known = new Map();
    for (const { old_digest: digest, old_path: path } of this.changes) {
      if (digest && digest !== this.row.digest && !known.has(digest)) known.set(digest, path);
    }
    const select = byId("rollback-version");
    const chosen = select.value;
    select.replaceChildren(
      ...[...known].map(([digest, path]) =>
        el("option", { value: digest, selected: digest === chosen }, `${version(digest)} from ${path}`),
      ),
    );
    this.paths = known;
    byId("rollback-form").hidden = !known.size;
  }

  async #run(button, work) {
    const error = button.closest("dialog").querySelector(".error");
    if (await whileBusy(button, error, work)) await this.changed();
    if (byId("adapter-dialog").open) await this.#readChanges();
  }

  async #load(name, path, inPlace, pinned = this.row?.pinned ?? false) {
    const body = { lora_name: name, lora_path: path, load_inplace: inPlace, pinned };
    await ask("v1/load_lora_adapter", { method: "POST", body });
    tell(`${name} was loaded from ${path}.`);
  }

  async #loadNew() {
    const name = byId("load-name").value;
    await this.#load(name, byId("load-path").value, byId("load-inplace").checked, byId("load-pinned").checked);
    byId("load-dialog").close();
  }

  /** Load the old version from where it lay, and look whether it still lies there. */
  async #rollBack() {
    const digest = byId("rollback-version").value;
    const path = this.paths.get(digest);
    const { name } = this.row;
    await this.#load(name, path, true);
    const card = await askJson(`v1/models/${encodeURIComponent(name)}`);
    if (card.digest !== digest) {
      throw new Error(
        `${path} holds other weights by now: ${version(card.digest)} was loaded, not ${version(digest)}.`,
      );
    }
    tell(`${name} was rolled back to ${version(digest)}.`);
  }

  async #resetOne(button) {
    const { name } = this.row;
    const text = "Cached KV of this adapter is forgotten. Its next requests compute it anew.";
    if (!(await confirmed(`Reset the prefix cache of ${name}?`, text, "Reset"))) return;
    await this.#run(button, async () => {
      await reset(name);
      tell(`The prefix cache of ${name} was reset.`);
    });
  }

  async #unload(button) {
    const { name } = this.row;
    const text = "Its running requests end as they began; new ones for this name are refused.";
    if (!(await confirmed(`Unload ${name}?`, text, "Unload"))) return;
    await this.#run(button, async () => {
      await ask("v1/unload_lora_adapter", { method: "POST", body: { lora_name: name } });
      byId("adapter-dialog").close();
      tell(`${name} was unloaded.`);
    });
  }
}

const reset = (name) =>
  ask("reset_prefix_cache", { method: "POST", body: name === undefined ? {} : { lora_name: name } });
