/* Level of detail: a million actions are drawn by visiting only about as many as there are
 * pixels. */

const CLASSES = [
  { name: "forward", colour: "--forward" },
  { name: "backward", colour: "--backward" },
  { name: "weight gradients", colour: "--weight" },
  { name: "recompute", colour: "--recompute" },
  { name: "gather, broadcast", colour: "--gather" },
  { name: "reduce-scatter", colour: "--scatter" },
  { name: "all-reduce", colour: "--reduce" },
  { name: "send and receive", colour: "--message" },
  { name: "all-to-all", colour: "--exchange" },
  { name: "norm and update", colour: "--update" },
  { name: "other", colour: "--other" },
];
const OTHER = CLASSES.length - 1;

/* Classifies an action by its kind: the first pattern that matches. */
const COMMUNICATES = [[/scatter/, 5], [/gather|broadcast|share/, 4], [/send|recv|shift/, 7], [/all.?to.?all|dispatch|return|collect|hand_back/, 8], [/reduce/, 6]];
const COMPUTES = [[/recompute/, 3], [/backward_weight/, 2], [/backward/, 1], [/forward|cast/, 0], [/update|norm|squares|sums|momentum|orthogonalize/, 9]];
function classOf(action) {
  const found = (action.group === undefined ? COMPUTES : COMMUNICATES).find(([pattern]) => pattern.test(action.kind));
  return found ? found[1] : OTHER;
}

const FAN = 8;

/* Non-overlapping events of one row in order, and above them a tree: a node of a level spans FAN
 * nodes of the level below and records how long each class was busy in it. An event may stand for
 * several that a server has merged, with the share of the time that they take. */
class Lane {
  constructor(timeline, classes, first, count) {
    this.timeline = timeline;
    this.classes = classes;
    this.first = first;
    this.count = count;
    this.levels = [];
    for (; count > FAN; count = this.levels[this.levels.length - 1].begin.length)
      this.levels.push(this.summary(Math.ceil(count / FAN)));
  }

  begin(i) { return this.timeline.begin[this.first + i]; }
  end(i) { return this.timeline.begin[this.first + i] + this.timeline.seconds[this.first + i]; }
  classAt(i) { return this.classes[this.timeline.action[this.first + i]]; }
  shareAt(i) { return this.timeline.share?.[this.first + i] ?? 1; }
  isMerged(i) { return this.timeline.merged?.[this.first + i] > 1; }

  summary(count) {
    const below = this.levels[this.levels.length - 1], n = below ? below.begin.length : this.count;
    const level = { begin: new Float64Array(count), end: new Float64Array(count), busy: new Float32Array(count * CLASSES.length) };
    for (let i = 0; i < count; i++) {
      const from = i * FAN, to = Math.min(n, from + FAN), at = i * CLASSES.length;
      level.begin[i] = below ? below.begin[from] : this.begin(from);
      level.end[i] = below ? below.end[to - 1] : this.end(to - 1);
      for (let k = from; k < to; k++)
        if (below)
          for (let c = 0; c < CLASSES.length; c++)
            level.busy[at + c] += below.busy[k * CLASSES.length + c];
        else
          level.busy[at + this.classAt(k)] += this.timeline.seconds[this.first + k] * this.shareAt(k);
    }
    return level;
  }

  /* Calls event(i) for those wider than `least` seconds, and block(begin, end, class, share) for
   * runs of smaller ones, from t0 to t1. */
  visit(t0, t1, least, event, block) {
    const top = this.levels.length, n = top ? this.levels[top - 1].begin.length : this.count;
    for (let i = 0; i < n; i++)
      this.descend(top, i, t0, t1, least, event, block);
  }

  descend(depth, i, t0, t1, least, event, block) {
    if (depth === 0) {
      const begin = this.begin(i), end = this.end(i);
      if (end < t0 || begin > t1)
        return;
      if (end - begin >= least && !this.isMerged(i))
        event(i, begin, end);
      else
        block(begin, end, this.classAt(i), this.shareAt(i));
      return;
    }
    const level = this.levels[depth - 1], begin = level.begin[i], end = level.end[i];
    if (end < t0 || begin > t1)
      return;
    if (end - begin < least) {
      let most = 0, sum = 0;
      for (let c = 0; c < CLASSES.length; c++) {
        const busy = level.busy[i * CLASSES.length + c];
        sum += busy;
        if (busy > level.busy[i * CLASSES.length + most])
          most = c;
      }
      block(begin, end, most, end > begin ? Math.min(1, sum / (end - begin)) : 1);
      return;
    }
    const last = Math.min((i + 1) * FAN, depth > 1 ? this.levels[depth - 2].begin.length : this.count);
    for (let k = i * FAN; k < last; k++)
      this.descend(depth - 1, k, t0, t1, least, event, block);
  }

  /* The event at a time, or the nearest within `slack`; -1: none. */
  find(time, slack) {
    let low = 0, high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.begin(middle) <= time)
        low = middle + 1;
      else
        high = middle;
    }
    let best = -1, distance = slack;
    for (const i of [low - 1, low])
      if (i >= 0 && i < this.count) {
        const away = Math.max(0, this.begin(i) - time, time - this.end(i));
        if (away < distance || (away === 0 && best < 0)) {
          best = i;
          distance = away;
        }
      }
    return best;
  }
}
