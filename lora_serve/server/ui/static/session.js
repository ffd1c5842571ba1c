// The key of whoever reads the page, and what it may do. The key is kept in this tab alone.

const STORED = "lora-serve.key";

export const session = {
  /** What /v1/caller said, or null before it has been asked. */
  caller: null,

  get key() {
    return sessionStorage.getItem(STORED) ?? "";
  },

  set key(value) {
    if (value) sessionStorage.setItem(STORED, value);
    else sessionStorage.removeItem(STORED);
  },

  get mayChange() {
    return this.caller?.may_change_server ?? false;
  },
};
