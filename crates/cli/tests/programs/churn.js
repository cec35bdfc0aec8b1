// Makes large objects for some seconds, each in a piece of memory of its own at a random
// address; then gives all up, says so, and waits for so many seconds more.
//
//   node --expose-gc churn.js SECONDS WAIT
'use strict';

const end = Date.now() + 1000 * Number(process.argv[2]);
let live = new Array(300);
let turn = 0;
function step() {
  for (let i = 0; i < 20; i++, turn++) {
    live[turn % live.length] = new Array(20000 + (turn % 300)).fill(turn);
  }
  if (Date.now() < end) {
    setImmediate(step);
    return;
  }
  live = [];
  globalThis.gc();
  console.log('all given up');
  setTimeout(() => console.log('churn ok'), 1000 * Number(process.argv[3]));
}
step();
