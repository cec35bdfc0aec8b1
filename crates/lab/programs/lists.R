# Lists of strings and a matrix, summed three times. Prints one digest.
count <- as.integer(commandArgs(trailingOnly = TRUE)[1])
entries <- lapply(seq_len(count), function(i) list(name = paste("entry", i, "of", (i * 7919) %% 1000003), number = i %% 997))
matrix <- matrix((seq_len(count * 8) * 48271) %% 1000003, ncol = 8)
digest <- function() {
  total <- 0
  for (entry in entries) total <- (total * 31 + nchar(entry$name) + entry$number) %% 1000003
  total + sum(colSums(matrix) %% 1000003)
}
first <- digest()
for (round in 1:2) stopifnot(digest() == first)
cat(format(first, digits = 15), length(entries), "\n")
