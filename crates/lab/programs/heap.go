// Maps of strings and slices, hashed three times with garbage in between. Prints one digest.
package main

import (
	"fmt"
	"hash/crc32"
	"os"
	"strconv"
)

func main() {
	count, _ := strconv.Atoi(os.Args[1])
	blobs := make(map[string][]byte)
	names := make([]string, 0, count)
	seed := uint64(1)
	for i := 0; i < count; i++ {
		seed = seed*6364136223846793005 + 1442695040888963407
		name := fmt.Sprintf("entry %d of the heap %x", i, seed)
		blob := make([]byte, 100+seed>>40%900)
		for j := range blob {
			blob[j] = byte(uint64(j) * (seed >> 60))
		}
		names = append(names, name)
		blobs[name] = blob
	}
	digest := func() uint32 {
		sum := uint32(0)
		for _, name := range names {
			sum = sum*31 + crc32.ChecksumIEEE(blobs[name])
		}
		return sum
	}
	first := digest()
	for round := 0; round < 2; round++ {
		garbage := make([][]int, 0)
		for i := 0; i < 20000; i++ {
			garbage = append(garbage, make([]int, 50+i%100))
		}
		if digest() != first || len(garbage) != 20000 {
			panic("the digests differ")
		}
	}
	fmt.Println(first, len(blobs))
}
