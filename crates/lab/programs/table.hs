-- A map of strings and lists, folded three times. Prints one digest.
import qualified Data.IntMap.Strict as Map
import System.Environment (getArgs)

entry :: Int -> (String, [Int])
entry i = let text = "entry " ++ show (i * 7919) in length text `seq` (text, [i, i `mod` 997, i * 3])

digest :: Map.IntMap (String, [Int]) -> Int
digest = Map.foldl' (\total (text, numbers) -> (total * 31 + length text + sum numbers) `mod` 1000000007) 0

main :: IO ()
main = do
  [text] <- getArgs
  let count = read text
      table = Map.fromList [(i, entry i) | i <- [0 .. count - 1]]
      first = digest table
      second = digest (Map.insert 0 (entry 0) table)
      third = digest (Map.delete (-1) table)
  if first == second && second == third then print (first, Map.size table) else error "the digests differ"
