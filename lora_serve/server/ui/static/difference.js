// Where two answers first differ.

/** How many code units two texts share from their beginning, cutting no character in two. */
export function commonLength(one, other) {
  const shorter = Math.min(one.length, other.length);
  let length = 0;
  while (length < shorter && one[length] === other[length]) length += 1;
  const last = one.charCodeAt(length - 1);
  const isCut = length > 0 && last >= 0xd800 && last <= 0xdbff;
  return isCut ? length - 1 : length;
}

/**
 * What can be said of two answers, each a text that may still grow.
 * @param {{text: string, isOver: boolean}} one
 * @param {{text: string, isOver: boolean}} other
 * @returns {?number} where they differ: a place in both texts, -1 if both are over and equal, null
 *     if nothing can be said yet.
 */
export function firstDifference(one, other) {
  const common = commonLength(one.text, other.text);
  const isEndOfOne = common === one.text.length;
  const isEndOfOther = common === other.text.length;
  if (isEndOfOne && isEndOfOther) return one.isOver && other.isOver ? -1 : null;
  if ((isEndOfOne && !one.isOver) || (isEndOfOther && !other.isOver)) return null;
  return common;
}
