import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.Map;

/** Answers each line with itself, after a look at a small part of a large cache. */
public class Cache {
    public static void main(String[] arguments) throws Exception {
        Map<Integer, String> cache = new HashMap<>();
        for (int key = 0; key < 700_000; key++) {
            cache.put(key, "value " + key + " " + "x".repeat(60));
        }
        System.gc();
        System.out.println("ready");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            int number = Integer.parseInt(line);
            long length = 0;
            for (int step = 0; step < 2000; step++) {
                length += cache.get((number * 31 + step * 7) % 20_000).length();
            }
            System.out.println(length < 0 ? "never" : line);
        }
    }
}
