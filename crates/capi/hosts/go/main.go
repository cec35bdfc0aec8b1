// Goroutines write and verify 128 MiB under a limit of 32 MiB while the collector runs; Go's own
// faults stay Go's. See ../run.sh.
package main

/*
#cgo pkg-config: memfold
#include <memfold.h>
*/
import "C"
import (
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"unsafe"
)

func main() {
	var limit *C.memfold
	var options C.memfold_options
	options.size = C.size_t(unsafe.Sizeof(options))
	options.limit_bytes = 32 << 20
	if C.memfold_new(&options, &limit) != 0 {
		panic(C.GoString(C.memfold_error_message()))
	}
	var memory unsafe.Pointer
	const size = 128 << 20
	if C.memfold_map(limit, size, &memory) != 0 {
		panic(C.GoString(C.memfold_error_message()))
	}
	words := unsafe.Slice((*uint64)(memory), size/8)
	debug.SetGCPercent(20)
	var group sync.WaitGroup
	const workers = 8
	bad := make([]int, workers)
	for w := 0; w < workers; w++ {
		group.Add(1)
		go func(w int) {
			defer group.Done()
			part := words[w*len(words)/workers : (w+1)*len(words)/workers]
			for round := uint64(1); round <= 4; round++ {
				for i := range part {
					part[i] = uint64(i/300)*round + uint64(w)
				}
				garbage := make([][]byte, 0)
				for i := range part {
					if part[i] != uint64(i/300)*round+uint64(w) {
						bad[w]++
					}
					if i%5000 == 0 {
						garbage = append(garbage, make([]byte, 1000))
					}
				}
				_ = garbage
			}
		}(w)
	}
	group.Wait()
	total := 0
	for _, wrong := range bad {
		total += wrong
	}
	stats := C.memfold_stats{size: C.sizeof_memfold_stats}
	C.memfold_get_stats(limit, &stats)
	own := catchesNil(nil)
	fmt.Printf("go: %d words wrong, %d pages in, own faults caught: %t\n", total, stats.pages_in, own)
	if total > 0 || stats.pages_in == 0 || !own {
		os.Exit(1)
	}
}

// A nil dereference is a signal that Go makes a panic of.
func catchesNil(nothing *int) (caught bool) {
	defer func() { caught = recover() != nil }()
	return *nothing == 0
}
