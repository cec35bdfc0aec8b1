(* A hash table of strings and lists, walked three times. Prints one digest. *)
let count = int_of_string Sys.argv.(1)
let table : (int, string * int list) Hashtbl.t = Hashtbl.create 1024
let () =
  for i = 0 to count - 1 do
    Hashtbl.replace table i (Printf.sprintf "entry %d of %d" i (i * 7919), [ i; i mod 997; i * 3 ])
  done
let digest () =
  let sum = ref 0 in
  for i = 0 to count - 1 do
    let text, numbers = Hashtbl.find table i in
    sum := ((!sum * 31) + String.length text + List.fold_left ( + ) 0 numbers) mod 1000000007
  done;
  !sum
let () =
  let first = digest () in
  for _ = 1 to 2 do
    Gc.full_major ();
    if digest () <> first then failwith "the digests differ"
  done;
  Printf.printf "%d %d\n" first (Hashtbl.length table)
