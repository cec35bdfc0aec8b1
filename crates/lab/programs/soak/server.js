// A server with a live heap of constant size: every request verifies and replaces some of its
// records.  Runs while the file named by its argument exists.
'use strict';
const { existsSync } = require('node:fs');
const { createServer } = require('node:http');

const RECORDS = 40000;
const REPLACED = 40;

let generation = 0;
function record(index) {
  const seed = Math.imul(index + 1, 0x45d9f3b) ^ Math.imul(++generation, 0x2c1b3c6d);
  const text = `record ${index} of generation ${generation} `.repeat(4 + (seed & 15));
  return { index, text, sum: sum(text), numbers: [seed, index * 1.5] };
}

function sum(text) {
  let sum = 0;
  for (let at = 0; at < text.length; at += 7) sum = (Math.imul(sum, 31) + text.charCodeAt(at)) | 0;
  return sum;
}

const records = new Map();
for (let index = 0; index < RECORDS; index++) records.set(`record-${index}`, record(index));

function answer(request, response) {
  const answered = [];
  for (let count = 0; count < REPLACED; count++) {
    const index = Math.floor(Math.random() * RECORDS);
    const found = records.get(`record-${index}`);
    if (found.index !== index || found.sum !== sum(found.text)) {
      console.error(`WRONG RESULT: record ${index}`);
      process.exit(3);
    }
    records.set(`record-${index}`, record(index));
    if (count < 4) answered.push(found);
  }
  const body = Buffer.from(JSON.stringify(answered));
  response.writeHead(200, { 'Content-Length': body.length });
  response.end(body);
}

const server = createServer(answer);
server.keepAliveTimeout = 0;
server.listen(0, '127.0.0.1', () => console.log(server.address().port));
setInterval(() => existsSync(process.argv[2]) || process.exit(0), 200);
