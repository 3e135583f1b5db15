// What test_java.py runs: posts each file to ADDRESS/PATH with the JDK's own client and its default preference, HTTP/2.
// Prints a line for each: version, status, body in Base64.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Path;
import java.util.Base64;
import java.util.stream.Collectors;

public class Ask {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 1; i < args.length; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[0]))
                    .header("Content-Type", "application/json")
                    .POST(HttpRequest.BodyPublishers.ofFile(Path.of(args[i])))
                    .build();
            var response = client.send(request, HttpResponse.BodyHandlers.ofLines());
            byte[] body = response.body().collect(Collectors.joining("\n")).getBytes("UTF-8");
            System.out.println(response.version() + " " + response.statusCode() + " " + Base64.getEncoder().encodeToString(body));
        }
    }
}
