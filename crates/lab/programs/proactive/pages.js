// A program like a browser: the objects of many pages, of which one is shown. Answers each line with itself.
const pages = [];
for (let page = 0; page < 60; page++) {
    const nodes = [];
    for (let node = 0; node < 12000; node++)
        nodes.push({ name: `node ${page} ${node}`, style: { left: node, top: page }, text: 'x'.repeat(20) + node });
    pages.push(nodes);
}
const shown = pages[7];
console.log('ready');
require('readline').createInterface({ input: process.stdin }).on('line', (line) => {
    let sum = 0;
    for (let step = 0; step < 2000; step++) {
        const node = shown[(Number(line) * 31 + step * 7) % shown.length];
        node.style.left += 1;
        sum += node.style.left;
    }
    console.log(sum < 0 ? 'never' : line);
});
