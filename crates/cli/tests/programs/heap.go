// Fills memory that compresses, with a map and a collector at work, and checks all of it.
//
//	heap MEGABYTES ROUNDS
package main

import (
	"fmt"
	"os"
	"strconv"
)

func value(block, at int) byte {
	return byte((block*7 + at) >> 8)
}

func main() {
	megabytes, _ := strconv.Atoi(os.Args[1])
	rounds, _ := strconv.Atoi(os.Args[2])
	blocks := make([][]byte, megabytes)
	names := map[int]string{}
	for block := range blocks {
		blocks[block] = make([]byte, 1<<20)
		for at := range blocks[block] {
			blocks[block][at] = value(block, at)
		}
	}
	for round := 0; round < rounds; round++ {
		for block, bytes := range blocks {
			for at := range bytes {
				if bytes[at] != value(block, at) {
					fmt.Println("MISMATCH in block", block, "at", at)
					os.Exit(1)
				}
			}
			// What the collector has to do.
			names[round*megabytes+block] = fmt.Sprint(round, block)
			blocks[block] = append([]byte(nil), bytes...)
		}
	}
	for round := 0; round < rounds; round++ {
		for block := range blocks {
			if names[round*megabytes+block] != fmt.Sprint(round, block) {
				fmt.Println("MISMATCH in names", round, block)
				os.Exit(1)
			}
		}
	}
	fmt.Println("heap ok")
}
