// Builds maps, strings, typed arrays and closures, and hashes all of it three times,
// with garbage made and collected in between.  Prints one digest a run.
'use strict';
const { createHash } = require('node:crypto');

const COUNT = Number(process.argv[2] || 120000);

function mix(x) {
  x = Math.imul(x ^ (x >>> 16), 0x45d9f3b);
  x = Math.imul(x ^ (x >>> 16), 0x45d9f3b);
  return (x ^ (x >>> 16)) >>> 0;
}

const records = new Map();
const arrays = [];
for (let i = 0; i < COUNT; i++) {
  const seed = mix(i + 1);
  records.set(`key-${i}-${seed.toString(16)}`, {
    text: `page ${seed} fault ${i} swap `.repeat(1 + (seed % 5)) + i,
    numbers: [seed, seed ^ i, i * 1.5],
    get: () => seed + i,
  });
  if (i % 16 === 0) {
    const array = new Float64Array(64 + (seed % 512));
    for (let j = 0; j < array.length; j++) array[j] = seed * j;
    arrays.push(array);
  }
}

function digest() {
  const hash = createHash('sha256');
  for (const [key, record] of records) {
    hash.update(key);
    hash.update(record.text);
    hash.update(record.numbers.join(','));
    hash.update(String(record.get()));
  }
  for (const array of arrays) hash.update(new Uint8Array(array.buffer));
  return hash.digest('hex');
}

const first = digest();
for (let round = 0; round < 2; round++) {
  let garbage = [];
  for (let i = 0; i < COUNT; i++) garbage.push({ i, text: 'x'.repeat(i % 50) });
  garbage = null;
  const again = digest();
  if (again !== first) {
    console.log(`MISMATCH ${first} ${again}`);
    process.exit(1);
  }
}
console.log(`digest ${first}`);
