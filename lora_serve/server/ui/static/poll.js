// Asks again and again, as long as somebody looks.

export class Poll {
  /**
   * @param {function(): Promise<void>} work  raises nothing.
   * @param {number} everyMs  from the beginning of one question to that of the next.
   */
  constructor(work, everyMs) {
    this.work = work;
    this.everyMs = everyMs;
    this.timer = null;
    this.isAsking = false;
    this.isWanted = false; // once more, when what is under way has ended
  }

  /** Ask now; the next question follows by itself, unless nobody looks. */
  async soon() {
    clearTimeout(this.timer);
    if (this.isAsking) {
      this.isWanted = true;
      return;
    }
    if (document.hidden) return;
    this.isAsking = true;
    this.isWanted = false;
    const begun = performance.now();
    try {
      await this.work();
    } finally {
      this.isAsking = false;
      const left = this.everyMs - (performance.now() - begun);
      const wait = this.isWanted ? 0 : Math.max(left, this.everyMs / 4);
      this.timer = setTimeout(() => this.soon(), wait);
    }
  }
}
