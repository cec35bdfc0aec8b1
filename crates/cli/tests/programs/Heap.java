import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.zip.CRC32;

/** Fills a heap with maps, strings and arrays, and checks all of it between collections. */
public class Heap {
    private static long digest(Map<String, byte[]> blobs, List<String> texts) {
        CRC32 crc = new CRC32();
        long total = 0;
        for (String text : texts) {
            crc.update(text.getBytes());
            byte[] blob = blobs.get(text);
            crc.update(blob);
            total = total * 31 + crc.getValue();
        }
        return total;
    }

    public static void main(String[] arguments) {
        int count = arguments.length > 0 ? Integer.parseInt(arguments[0]) : 100_000;
        Map<String, byte[]> blobs = new HashMap<>();
        List<String> texts = new ArrayList<>();
        long seed = 1;
        for (int i = 0; i < count; i++) {
            seed = seed * 6364136223846793005L + 1442695040888963407L;
            String text = "entry " + i + " of the heap " + Long.toHexString(seed);
            byte[] blob = new byte[200 + (int) ((seed >>> 40) % 1200)];
            for (int j = 0; j < blob.length; j++) {
                blob[j] = (byte) (j % 3 == 0 ? seed >>> (j % 57) : i);
            }
            texts.add(text);
            blobs.put(text, blob);
        }
        long first = digest(blobs, texts);
        for (int round = 0; round < 3; round++) {
            List<int[]> garbage = new ArrayList<>();
            for (int i = 0; i < 20_000; i++) {
                garbage.add(new int[100 + i % 300]);
            }
            System.gc();
            long again = digest(blobs, texts);
            if (again != first || garbage.size() != 20_000) {
                System.out.println("MISMATCH " + first + " " + again);
                System.exit(1);
            }
        }
        System.out.println("digest " + Long.toHexString(first));
    }
}
