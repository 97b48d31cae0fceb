# shellcheck shell=bash
cat >Work.java <<'END'
import java.net.*;
import java.util.concurrent.*;
import java.util.stream.*;
public class Work {
    public static void main(String[] words) throws Exception {
        System.out.println(IntStream.range(0, 200_000).parallel().mapToLong(n -> (long) n * n).sum());
        ExecutorService pool = Executors.newFixedThreadPool(8);
        System.out.println(pool.submit(() -> "of a thread").get());
        pool.shutdown();
        try (ServerSocket server = new ServerSocket(0, 1, InetAddress.getLoopbackAddress());
             Socket client = new Socket(server.getInetAddress(), server.getLocalPort()); Socket end = server.accept()) {
            client.getOutputStream().write(42);
            System.out.println(end.getInputStream().read());
        }
        for (int n = 0; n < 50; n++) { byte[] much = new byte[1 << 20]; much[n] = 1; }
        System.gc();
        try { int[] all = new int[Integer.MAX_VALUE - 8]; System.out.println(all.length); }
        catch (OutOfMemoryError error) { System.out.println("out of heap"); }
        System.exit(3);
    }
}
END
javac Work.java
java -Xmx64m Work || echo "exit $?"
