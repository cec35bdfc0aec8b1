#lang racket/base
;; A hash table of strings and vectors, walked three times. Prints one digest.
(define count (string->number (vector-ref (current-command-line-arguments) 0)))
(define table (make-hash))
(for ([i (in-range count)])
  (hash-set! table i (vector (format "entry ~a of ~a" i (* i 7919)) (modulo (* i 48271) 1000003) (list i (add1 i)))))
(define (digest)
  (for/fold ([sum 0]) ([i (in-range count)])
    (define entry (hash-ref table i))
    (modulo (+ (* sum 31) (string-length (vector-ref entry 0)) (vector-ref entry 1) (car (vector-ref entry 2)))
            1000000007)))
(define first-digest (digest))
(unless (and (= first-digest (digest)) (= first-digest (digest))) (error "the digests differ"))
(printf "~a ~a\n" first-digest (hash-count table))
