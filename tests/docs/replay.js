// Runs the figures' modules through a scenario and describes what they did as recordings.py describes the engine.

const describeTree = (nodes) =>
  [...nodes]
    .map((node) => [node.tokens, [...node.pages], node.locks, describeTree(node.children.values())])
    .sort((a, b) => (a[0] < b[0] ? -1 : 1));

const describePool = (kv) => ({
  free: kv.free.length,
  cached: kv.numCached,
  tree: describeTree(kv.tree.root.children.values()),
});

export function replaySchedule(scenario, { Scheduler, newRequest }) {
  const scheduler = new Scheduler(scenario);
  const requests = [];
  const steps = [];
  while (scheduler.hasWork || scenario.arrivals.some((arrival) => arrival.step >= steps.length)) {
    for (const { step, name, prompt, maxTokens } of scenario.arrivals) {
      if (step !== steps.length) continue;
      requests.push(newRequest(name, prompt, maxTokens));
      scheduler.add(requests.at(-1));
    }
    const batch = scheduler.run() ?? { rows: [], preempted: [], ended: [] };
    steps.push({
      rows: batch.rows.map((row) => [row.request.name, row.start, row.count, row.samples]),
      preempted: batch.preempted.map(({ request }) => request.name),
      copies: scheduler.kv.copies,
      ended: batch.ended.map((request) => request.name),
      waiting: scheduler.waiting.map((request) => request.name),
      pages: Object.fromEntries(requests.filter((r) => r.pages.length).map((r) => [r.name, [...r.pages]])),
      outputs: Object.fromEntries(requests.map((r) => [r.name, r.output])),
      ...describePool(scheduler.kv),
    });
  }
  return steps;
}

export function replayCache(scenario, { KVCache, newRequest }) {
  const kv = new KVCache(scenario.numPages, scenario.pageSize);
  const running = new Map();
  return scenario.moves.map(({ name, prompt }) => {
    const entry = { admitted: true, found: 0, copies: [] };
    kv.copies = [];
    if (prompt !== undefined) {
      const request = newRequest(name, prompt);
      const match = kv.match(request);
      entry.found = match.numTokens;
      entry.admitted = kv.admit(request, match, prompt.length);
      if (entry.admitted) {
        request.computed = prompt.length;
        kv.commit(request, true);
        kv.stepRead();
        running.set(name, request);
        entry.copies = kv.copies;
      }
    } else if (running.has(name)) {
      kv.release(running.get(name));
      running.delete(name);
    }
    entry.pages = Object.fromEntries([...running].map(([key, request]) => [key, [...request.pages]]));
    return { ...entry, ...describePool(kv) };
  });
}
