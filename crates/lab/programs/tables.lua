-- Tables of strings and numbers, hashed three times with garbage in between. Prints one digest.
local count = tonumber(arg[1])
local records = {}
local seed = 1
for i = 1, count do
  seed = (seed * 16807) % 2147483647
  records[i] = { name = "entry " .. i .. " of " .. seed, number = seed, list = { i, seed % 997, i % 13 } }
end
local function digest()
  local sum = 0
  for i = 1, #records do
    local record = records[i]
    sum = (sum * 31 + #record.name + record.number + record.list[2]) % 1000000007
  end
  return sum
end
local first = digest()
for round = 1, 2 do
  local garbage = {}
  for i = 1, 20000 do garbage[i] = { i, "garbage " .. i } end
  assert(digest() == first)
end
print(first, #records)
