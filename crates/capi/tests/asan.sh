#!/bin/sh
# The library's tests under AddressSanitizer, on a nightly toolchain: crates/capi/tests/asan.sh
#
# The sanitizer leaves SIGBUS and SIGSEGV to the library. Left out: c.rs and installed.rs, whose C
# programs would have to be linked with the sanitizer's runtime.
set -eu
cd "$(dirname "$0")/../../.."
export RUSTFLAGS="-Zsanitizer=address -Cforce-frame-pointers=yes"
export ASAN_OPTIONS="handle_segv=0:handle_sigbus=0:allow_user_segv_handler=1:detect_leaks=0"
exec cargo +nightly test --target x86_64-unknown-linux-gnu -p memfold -p memfold-capi --lib \
    --test allocation --test allocator --test interface --test c_interface --test oracle --test regions --test signals "$@"
