/* Runs a fuzz target on the seeds of the repository, so that every build tries them: fuzz_x
 * FOLDER. */
#include "base/text/strbuf.h"

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **argv)
{
    DIR *folder = argc == 2 ? opendir(argv[1]) : NULL;
    int tried = 0;
    if (!folder) {
        fprintf(stderr, "the folder of inputs cannot be read\n");
        return 1;
    }
    for (struct dirent *entry; (entry = readdir(folder));) {
        char path[4096], *text = NULL;
        size_t length = 0;
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", argv[1], entry->d_name);
        if (qd_file_read(path, 1 << 20, &text, &length) != QD_OK) {
            fprintf(stderr, "%s\n", qd_error_message());
            return 1;
        }
        printf("%s\n", path); /* the last line names the failing input */
        fflush(stdout);
        LLVMFuzzerTestOneInput((const uint8_t *)text, length);
        free(text);
        tried++;
    }
    closedir(folder);
    return tried > 0 ? 0 : 1;
}
