-- Builds a database in memory and checks it: prints "ok" and sums that depend on every row.
CREATE TABLE entries (id INTEGER PRIMARY KEY, name TEXT, hash INTEGER, body TEXT);
WITH RECURSIVE counter(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counter WHERE n < 250000)
INSERT INTO entries
SELECT n, printf('entry-%08d', (n * 7919) % 1000003), (n * 2654435761) % 4294967296,
       printf('body of %d: %x %x and a sentence of ordinary text that repeats', n, n * 48271 % 2147483647, n * n)
FROM counter;
CREATE INDEX by_name ON entries (name);
CREATE INDEX by_hash ON entries (hash);
CREATE TABLE copies AS SELECT id, hash, upper(body) AS body FROM entries WHERE hash % 3 = 0;
UPDATE entries SET body = body || ' (' || hash || ')' WHERE id % 5 = 0;
DELETE FROM entries WHERE id % 11 = 0;
PRAGMA integrity_check;
SELECT count(*), sum(id), sum(hash), sum(length(body)) FROM entries;
SELECT count(*), sum(hash), sum(length(body)) FROM copies;
SELECT name, hash FROM entries ORDER BY name LIMIT 3 OFFSET 100000;
SELECT sum(e.hash % 1000), count(*) FROM entries e JOIN copies c ON e.hash = c.hash;
SELECT group_concat(piece, '') FROM (SELECT substr(body, 9, 4) AS piece FROM entries WHERE id % 2500 = 0 ORDER BY hash);
