import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.LongBuffer;

/** Threads write and verify 128 MiB under a limit of 32 MiB while the collector runs; the virtual
 * machine's own faults stay its own. See ../run.sh. */
public class Host {
    static native ByteBuffer map(long bytes, long limit);

    static native long pagesIn();

    static final int ROUNDS = 4, WORKERS = 6;

    /** How many words of a worker's part are wrong. */
    static long work(LongBuffer words, int worker) {
        int from = (int) ((long) words.capacity() * worker / WORKERS);
        int to = (int) ((long) words.capacity() * (worker + 1) / WORKERS);
        Object[] garbage = new Object[100];
        long wrong = 0;
        for (long round = 1; round <= ROUNDS; round++) {
            for (int index = from; index < to; index++) words.put(index, index / 300 * round + worker);
            for (int index = from; index < to; index++) {
                if (words.get(index) != index / 300 * round + worker) wrong++;
                if (index % 1000 == 0) garbage[index / 1000 % 100] = new byte[10_000];
            }
        }
        return wrong;
    }

    /** Null checks are signals once the code is compiled. */
    static boolean catchesNull(Object nothing) {
        int caught = 0;
        for (int turn = 0; turn < 20_000; turn++) {
            try {
                nothing.hashCode();
            } catch (NullPointerException expected) {
                caught++;
            }
        }
        return caught == 20_000;
    }

    static int recurse(int depth) {
        return recurse(depth + 1) + 1;
    }

    static boolean catchesOverflow() {
        try {
            return recurse(0) < 0;
        } catch (StackOverflowError expected) {
            return true;
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.load(arguments[0]);
        ByteBuffer memory = map(128 << 20, 32 << 20);
        LongBuffer words = memory.order(ByteOrder.nativeOrder()).asLongBuffer();
        long[] wrong = new long[WORKERS];
        Thread[] threads = new Thread[WORKERS];
        for (int worker = 0; worker < WORKERS; worker++) {
            final int own = worker;
            threads[own] = new Thread(() -> wrong[own] = work(words, own));
            threads[own].start();
        }
        long total = 0;
        for (int worker = 0; worker < WORKERS; worker++) {
            threads[worker].join();
            total += wrong[worker];
        }
        boolean own = catchesNull(null) && catchesOverflow();
        System.out.printf("java: %d words wrong, %d pages in, own faults %s%n",
                total, pagesIn(), own ? "caught" : "LOST");
        System.exit(total == 0 && pagesIn() > 0 && own ? 0 : 1);
    }
}
